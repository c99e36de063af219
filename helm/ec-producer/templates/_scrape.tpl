{{- /* One endpoint of a PodMonitor or ServiceMonitor, of that part of the values. */ -}}
{{- define "ec-producer.scrape" -}}
port: metrics
path: /metrics
interval: {{ .interval }}
scrapeTimeout: {{ .scrapeTimeout }}
{{- with .relabelings }}
relabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
