{{- /* The pod, for Deployment and StatefulSet alike. */ -}}

{{- define "ec-producer.podTemplate" -}}
metadata:
  labels:
    {{- merge (include "ec-producer.selectorLabels" . | fromYaml) .Values.podLabels .Values.commonLabels | toYaml | nindent 4 }}
  annotations:
    {{- merge (dict "kubectl.kubernetes.io/default-container" "producer") .Values.podAnnotations .Values.commonAnnotations | toYaml | nindent 4 }}
spec:
  {{- include "ec-producer.podSpec" . | nindent 2 }}
{{- end }}

{{- define "ec-producer.podSpec" -}}
{{- $v := .Values -}}
serviceAccountName: {{ include "ec-producer.serviceAccountName" . | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "ec-producer.graceSeconds" . }}
securityContext:
  {{- toYaml $v.podSecurityContext | nindent 2 }}
{{- include "ec-producer.placing" (dict "root" . "values" $v) }}
{{- with $v.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{ toYaml . | nindent 4 | trim }}
    {{- if not .labelSelector }}
    labelSelector:
      matchLabels:
        {{- include "ec-producer.selectorLabels" $ | nindent 8 }}
    {{- end }}
  {{- end }}
{{- end }}
{{- if $v.shareProcessNamespace }}
shareProcessNamespace: true
{{- end }}
{{- if or (eq $v.model.source "init") $v.extraInitContainers }}
initContainers:
  {{- if eq $v.model.source "init" }}
  {{- include "ec-producer.modelInit" . | nindent 2 }}
  {{- end }}
  {{- with $v.extraInitContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
containers:
  - name: producer
    {{- include "ec-producer.container" . | nindent 4 }}
  {{- with $v.extraContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
volumes:
  {{- include "ec-producer.volumes" . | nindent 2 }}
{{- end }}

{{- define "ec-producer.container" -}}
{{- $v := .Values -}}
image: {{ include "ec-producer.image" (dict "image" $v.image "chart" .Chart) | quote }}
imagePullPolicy: {{ $v.image.pullPolicy }}
command: [ec-producer]
args:
  {{- include "ec-producer.args" . | nindent 2 }}
env:
  {{- include "ec-producer.env" (dict "own" (include "ec-producer.producerEnv" .) "extra" $v.extraEnv) | trim | nindent 2 }}
{{- with $v.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - name: grpc
    containerPort: {{ int $v.ports.grpc }}
  - name: metrics
    containerPort: {{ int $v.ports.metrics }}
{{- include "ec-producer.probes" . }}
{{- if $v.drain.preStopSeconds }}
lifecycle:
  preStop:
    sleep:
      seconds: {{ int $v.drain.preStopSeconds }}
{{- end }}
resources:
  {{- include "ec-producer.resources" . | nindent 2 }}
securityContext:
  {{- include "ec-producer.containerSecurityContext" . | nindent 2 }}
volumeMounts:
  {{- include "ec-producer.volumeMounts" . | nindent 2 }}
{{- end }}

{{- /* The drain, and the bounds of what comes around it: the device thread and the transports' processes end within 30 s. */ -}}
{{- define "ec-producer.graceSeconds" -}}
{{- add (int .Values.drain.preStopSeconds) (ceil .Values.drain.deadlineSeconds | int) 30 -}}
{{- end }}

{{- define "ec-producer.probes" }}
{{- $p := .Values.probes }}
startupProbe:
  {{- include "ec-producer.ask" . | nindent 2 }}
  periodSeconds: {{ int $p.startup.periodSeconds }}
  timeoutSeconds: 5
  failureThreshold: {{ divf $p.startup.timeoutSeconds $p.startup.periodSeconds | ceil | int }}
readinessProbe:
  {{- include "ec-producer.ask" . | nindent 2 }}
  periodSeconds: {{ int $p.readiness.periodSeconds }}
  timeoutSeconds: 5
  failureThreshold: {{ int $p.readiness.failureThreshold }}
{{- if $p.liveness.enabled }}
livenessProbe:
  {{- include "ec-producer.ask" . | nindent 2 }}
  periodSeconds: {{ int $p.liveness.periodSeconds }}
  timeoutSeconds: 10
  failureThreshold: {{ divf $p.liveness.afterSeconds $p.liveness.periodSeconds | ceil | int }}
{{- end }}
{{- end }}

{{- /* Kubernetes' gRPC probes have no TLS; /healthz says the same. */ -}}
{{- define "ec-producer.ask" -}}
{{- if .Values.tls.enabled -}}
httpGet:
  path: /healthz
  port: metrics
{{- else -}}
grpc:
  port: {{ int .Values.ports.grpc }}
  service: ec_producer.v1.EncoderCache
{{- end }}
{{- end }}

{{- /* Extended resources and huge pages are asked for where they are limited. */ -}}
{{- define "ec-producer.resources" -}}
{{- $v := .Values -}}
{{- $more := dict -}}
{{- if $v.gpu.enabled }}{{ $_ := set $more $v.gpu.resource 1 }}{{ end -}}
{{- if $v.rdma.enabled }}{{ $_ := set $more $v.rdma.resource (int $v.rdma.count) }}{{ end -}}
{{- if $v.hugepages.size }}{{ $_ := set $more (printf "hugepages-%s" $v.hugepages.size) $v.hugepages.amount }}{{ end -}}
{{- merge (dict) (dict "limits" $more) $v.resources | toYaml -}}
{{- end }}

{{- define "ec-producer.containerSecurityContext" -}}
{{- if .Values.rdma.ipcLock -}}
{{- $root := dict "runAsNonRoot" false "runAsUser" 0 "capabilities" (dict "drop" (list "ALL") "add" (list "IPC_LOCK")) -}}
{{- mergeOverwrite (deepCopy .Values.containerSecurityContext) $root | toYaml -}}
{{- else -}}
{{- toYaml .Values.containerSecurityContext -}}
{{- end -}}
{{- end }}

{{- /* Where a pod may run. Takes root, and values with the node selection. */ -}}
{{- define "ec-producer.placing" }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $name := list "nodeSelector" "tolerations" "affinity" }}
{{- with get $.values $name }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- range $name := list "runtimeClassName" "priorityClassName" "schedulerName" }}
{{- with get $.root.Values $name }}
{{ $name }}: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "ec-producer.modelInit" -}}
{{- $i := .Values.model.init -}}
- name: model
  image: {{ $i.image | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  {{- with $i.command }}
  command:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $i.args }}
  args:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  env:
    {{- include "ec-producer.env" (dict "own" "- name: HOME\n  value: /tmp" "extra" $i.env) | trim | nindent 4 }}
  {{- with $i.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml .Values.containerSecurityContext | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: {{ .Values.model.mountPath | quote }}}
    - {name: tmp, mountPath: /tmp}
{{- end }}
