"""The Helm chart: rendered by Helm's own engine, checked against Kubernetes' schemas and against the real binary."""
