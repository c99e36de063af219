{{- /* The pod that `helm test` runs. */ -}}

{{- define "ec-producer.testLabels" -}}
app.kubernetes.io/name: {{ include "ec-producer.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: test
{{- end }}

{{- define "ec-producer.testHook" -}}
helm.sh/hook: test
helm.sh/hook-delete-policy: before-hook-creation
{{- end }}
