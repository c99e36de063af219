{{- /* Names, labels and formats. */ -}}

{{- define "ec-producer.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- /* Short enough for the longest suffix and a StatefulSet's pods. */ -}}
{{- define "ec-producer.fullname" -}}
{{- $name := include "ec-producer.name" . -}}
{{- $whole := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $whole .Values.fullnameOverride | trunc 42 | trimSuffix "-" -}}
{{- end }}

{{- define "ec-producer.serviceAccountName" -}}
{{- $own := ternary (include "ec-producer.fullname" .) "default" .Values.serviceAccount.create -}}
{{- default $own .Values.serviceAccount.name -}}
{{- end }}

{{- define "ec-producer.selectorLabels" -}}
app.kubernetes.io/name: {{ include "ec-producer.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: producer
{{- end }}

{{- define "ec-producer.consumerSelectorLabels" -}}
app.kubernetes.io/name: {{ include "ec-producer.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: consumer
{{- end }}

{{- /* `metadata` of an object. Takes root, name; suffix, labels, annotations, namespace and component if need be. */ -}}
{{- define "ec-producer.metadata" -}}
{{- $root := .root -}}
{{- $component := default "producer" .component -}}
{{- $own := dict
    "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-")
    "app.kubernetes.io/name" (include "ec-producer.name" $root)
    "app.kubernetes.io/instance" $root.Release.Name
    "app.kubernetes.io/version" (include "ec-producer.version" $root)
    "app.kubernetes.io/managed-by" $root.Release.Service
    "app.kubernetes.io/component" $component -}}
name: {{ printf "%s%s" (include "ec-producer.fullname" $root) (default "" .suffix) | quote }}
namespace: {{ default $root.Release.Namespace .namespace | quote }}
labels:
  {{- merge $own (default dict .labels) $root.Values.commonLabels | toYaml | nindent 2 }}
{{- with merge (dict) (default dict .annotations) $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* What a label can hold of the image's tag. */ -}}
{{- define "ec-producer.version" -}}
{{- default .Chart.AppVersion .Values.image.tag | trunc 63 | trimSuffix "-" | trimSuffix "." | trimSuffix "_" -}}
{{- end }}

{{- /* An image's full name. Takes an image of the values and the chart. */ -}}
{{- define "ec-producer.image" -}}
{{- $tag := .image.tag | default (ternary "" .chart.AppVersion (ne .image.digest "")) -}}
{{- .image.repository }}{{ with $tag }}:{{ . }}{{ end }}{{ with .image.digest }}@{{ . }}{{ end -}}
{{- end }}

{{- /* A value as a flag takes it: Helm's numbers are floats, and those from a million on would get an exponent. */ -}}
{{- define "ec-producer.text" -}}
{{- if kindIs "map" . -}}{{ toJson . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}{{ printf "%.0f" . }}
{{- else -}}{{ . }}{{- end -}}
{{- end }}

{{- /* Bytes of "4GiB" (the service's) or "4Gi" (Kubernetes'), or of a number. */ -}}
{{- define "ec-producer.bytes" -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15
    "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- $text := include "ec-producer.text" . | replace " " "" | trimSuffix "B" -}}
{{- $digits := regexFind "^[0-9.]+" $text -}}
{{- mulf (float64 $digits) (get $units (trimPrefix $digits $text) | default 1) | int64 -}}
{{- end }}

{{- /* Kubernetes replaces $(NAME) in commands and arguments; this text is meant as it is. */ -}}
{{- define "ec-producer.literal" -}}
{{- . | replace "$" "$$" -}}
{{- end }}

{{- define "ec-producer.maxReplicas" -}}
{{- ternary .Values.workload.replicas .Values.autoscaling.maxReplicas (eq .Values.autoscaling.kind "none") | int -}}
{{- end }}

{{- /* Pods of this release as a regular expression for queries. */ -}}
{{- define "ec-producer.podPattern" -}}
{{- $suffix := ternary "[0-9]+" "[a-z0-9]+-[a-z0-9]+" (eq .Values.workload.kind "StatefulSet") -}}
{{- include "ec-producer.fullname" . }}-{{ $suffix -}}
{{- end }}

{{- /* By pod: seconds that items wait, at the quantile; 0 where nothing came. */ -}}
{{- define "ec-producer.queueWait" -}}
{{- $labels := printf "namespace=%q,pod=~%q" .Release.Namespace (include "ec-producer.podPattern" .) -}}
{{- $a := .Values.autoscaling -}}
(histogram_quantile({{ $a.quantile }}, sum by (namespace, pod, le) (rate(ec_producer_queue_seconds_bucket{ {{- $labels -}} }[{{ $a.window }}]))) >= 0) or (0 * max by (namespace, pod) (ec_producer_queue_items{ {{- $labels -}} }))
{{- end }}

{{- /* Where consumers of this release find its producers: each by its own name, or the one by the service's. */ -}}
{{- define "ec-producer.producers" -}}
{{- $name := include "ec-producer.fullname" . -}}
{{- $port := int .Values.ports.grpc -}}
{{- if eq .Values.workload.kind "StatefulSet" -}}
{{- range $i := until (include "ec-producer.maxReplicas" . | int) }}
- {{ $name }}-{{ $i }}.{{ $name }}-headless.{{ $.Release.Namespace }}.svc:{{ $port }}
{{- end -}}
{{- else }}
- {{ $name }}.{{ .Release.Namespace }}.svc:{{ $port }}
{{- end -}}
{{- end }}
