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

{{- /* "yes" where the pod can have what the service wants of clients. */ -}}
{{- define "ec-producer.canTest" -}}
{{- $c := .Values.consumer -}}
{{- $tls := or (not .Values.tls.enabled) $c.tlsCaSecret -}}
{{- $certificate := or (not .Values.tls.clientCaSecret) $c.tlsSecret -}}
{{- $token := or (not .Values.tokens.secret) $c.tokenSecret -}}
{{- if and .Values.test.enabled $tls $certificate $token }}yes{{ end -}}
{{- end }}
