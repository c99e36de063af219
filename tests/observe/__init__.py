"""What an operator sees: the dashboard, the rules, and a run of both on a real producer and a real Prometheus."""
