{{- /* The service's command line, as a YAML list. Each flag is one word, so that a value may begin with a dash. */ -}}

{{- define "ec-producer.args" -}}
{{- $v := .Values -}}
- serve
- {{ include "ec-producer.model" . | quote }}
{{- $any := ternary "[::]" "0.0.0.0" $v.ipv6 }}
{{- $host := include "ec-producer.advertiseHost" . }}
- {{ printf "--listen=%s:%d" $any (int $v.ports.grpc) | quote }}
- {{ printf "--metrics-listen=%s:%d" $any (int $v.ports.metrics) | quote }}
- {{ printf "--advertise=%s:%d" $host (int $v.ports.grpc) | quote }}
- --drain-s={{ include "ec-producer.text" $v.drain.deadlineSeconds }}
{{- if eq $v.model.source "hub" }}
{{- with $v.model.revision }}
- {{ printf "--revision=%s" (include "ec-producer.literal" .) | quote }}
{{- end }}
{{- end }}
{{- if $v.model.trustRemoteCode }}
- --trust-remote-code
{{- end }}
{{- if $v.tls.enabled }}
- --tls-cert=/etc/ec-producer/tls/tls.crt
- --tls-key=/etc/ec-producer/tls/tls.key
{{- if $v.tls.clientCaSecret }}
- --tls-client-ca=/etc/ec-producer/client-ca/ca.crt
{{- end }}
{{- end }}
{{- if $v.tokens.secret }}
- {{ printf "--token-file=/etc/ec-producer/tokens/%s" $v.tokens.key | quote }}
{{- end }}
{{- if $v.transports.nixl.enabled }}
- --transport=nixl
{{- with $v.transports.nixl.devices }}
- {{ printf "--nixl-devices=%s" (include "ec-producer.literal" .) | quote }}
{{- end }}
{{- end }}
{{- if $v.transports.mooncake.enabled }}
- --transport=mooncake
- --mooncake-host=$(POD_IP)
- --mooncake-protocol={{ $v.transports.mooncake.protocol }}
{{- end }}
{{- if $v.files.claim }}
- {{ printf "--publish-files=%s" $v.files.mountPath | quote }}
{{- end }}
{{- range $name, $value := $v.config }}
{{- if kindIs "bool" $value }}
{{- if $value }}
- --{{ $name }}
{{- end }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%s" $name (include "ec-producer.literal" (include "ec-producer.text" $value)) | quote }}
{{- end }}
{{- end }}
{{- range $v.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "ec-producer.model" -}}
{{- $m := .Values.model -}}
{{- if eq $m.source "hub" -}}{{ include "ec-producer.literal" $m.name }}
{{- else -}}{{ include "ec-producer.literal" (printf "%s/%s" $m.mountPath $m.path | trimSuffix "/") }}
{{- end -}}
{{- end }}

{{- define "ec-producer.advertiseHost" -}}
{{- if .Values.advertiseHost -}}{{ .Values.advertiseHost }}
{{- else if eq .Values.workload.kind "StatefulSet" -}}
$(POD_NAME).{{ include "ec-producer.fullname" . }}-headless.{{ .Release.Namespace }}.svc
{{- else if .Values.ipv6 -}}[$(POD_IP)]
{{- else -}}$(POD_IP)
{{- end -}}
{{- end }}

{{- /* The environment as a YAML list, by name: an entry of `extra` stands in place of the chart's own. Takes own (a
   YAML list) and extra (a list). The pod's own address and name come first, since others may refer to them. */ -}}
{{- define "ec-producer.env" -}}
{{- $names := dict -}}
{{- range .extra }}{{ $_ := set $names .name true }}{{ end -}}
{{- range fromYamlArray .own }}
{{- if not (hasKey $names .name) }}
- {{ toYaml . | nindent 2 | trim }}
{{- end }}
{{- end }}
{{- range .extra }}
- {{ toYaml . | nindent 2 | trim }}
{{- end }}
{{- end }}

{{- /* What the chart sets of every container that runs vLLM's code. */ -}}
{{- define "ec-producer.commonEnv" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: HOME
  value: /home/ec-producer
- name: USER
  value: ec-producer
{{- with .Values.model }}
{{- if eq .source "hub" }}
- name: HF_HOME
  value: {{ .mountPath | quote }}
{{- with .hub.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- if .hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .hub.tokenSecret | quote }}, key: {{ .hub.tokenKey | quote }}}}
{{- end }}
{{- else }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- end }}
{{- end }}

{{- define "ec-producer.producerEnv" -}}
{{ include "ec-producer.commonEnv" . }}
- name: GLOO_SOCKET_IFNAME  # or PyTorch's process group of one would listen on the pod's address
  value: lo
{{- with .Values.transports.nixl }}
{{- if .enabled }}
- name: UCX_TCP_PORT_RANGE
  value: {{ printf "%d-%d" (int .ports.first) (int .ports.last) | quote }}
{{- end }}
{{- end }}
{{- with .Values.transports.mooncake }}
{{- if .enabled }}
- name: MC_MIN_RPC_PORT
  value: {{ int .ports.first | quote }}
- name: MC_MAX_RPC_PORT
  value: {{ int .ports.last | quote }}
{{- end }}
{{- end }}
{{- end }}
