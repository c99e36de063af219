{{- /* A vLLM without an encoder, with the shim: what it needs of the producers of this release. */ -}}

{{- define "ec-producer.consumerArgs" -}}
{{- $v := .Values -}}
{{- $c := $v.consumer -}}
- serve
- {{ include "ec-producer.model" . | quote }}
- --host={{ ternary "::" "0.0.0.0" $v.ipv6 }}
- --port={{ int $c.port }}
{{- with $c.servedModelName }}
- {{ printf "--served-model-name=%s" (include "ec-producer.literal" .) | quote }}
{{- end }}
{{- if eq $v.model.source "hub" }}
{{- with $v.model.revision }}
- {{ printf "--revision=%s" (include "ec-producer.literal" .) | quote }}
{{- end }}
{{- end }}
{{- if $v.model.trustRemoteCode }}
- --trust-remote-code
{{- end }}
{{- if and $c.gpu.enabled (gt (int $c.gpu.count) 1) }}
- --tensor-parallel-size={{ int $c.gpu.count }}
{{- end }}
{{- with $c.limitMmPerPrompt }}
- {{ printf "--limit-mm-per-prompt=%s" (toJson .) | squote }}
{{- end }}
{{- with get $v.config "mm-processor-kwargs" }}
- {{ printf "--mm-processor-kwargs=%s" (toJson . | include "ec-producer.literal") | quote }}
{{- end }}
{{- with get $v.config "media-io-kwargs" }}
- {{ printf "--media-io-kwargs=%s" (toJson . | include "ec-producer.literal") | quote }}
{{- end }}
- {{ printf "--ec-transfer-config=%s" (include "ec-producer.transferConfig" .) | quote }}
- --middleware=consumer_shim.middleware.EncodeMiddleware
{{- range $c.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- /* vLLM's --ec-transfer-config. Kubernetes puts the pod's address in; all else is meant as it is. */ -}}
{{- define "ec-producer.transferConfig" -}}
{{- $v := .Values -}}
{{- $c := $v.consumer -}}
{{- $shim := dict "producers" (include "ec-producer.producers" . | fromYamlArray) -}}
{{- range $name, $value := $c.shim -}}
{{- $_ := set $shim $name $value -}}
{{- end -}}
{{- if $v.transports.mooncake.enabled -}}
{{- $_ := set $shim "mooncake_host" "$(POD_IP)" -}}
{{- if not (hasKey $shim "mooncake_protocol") }}{{ $_ := set $shim "mooncake_protocol" $v.transports.mooncake.protocol }}{{ end -}}
{{- end -}}
{{- if $v.tls.enabled -}}
{{- $_ := set $shim "tls_ca" "/etc/ec-producer/ca/ca.crt" -}}
{{- with $c.tlsServerName }}{{ $_ := set $shim "tls_server_name" . }}{{ end -}}
{{- if $c.tlsSecret -}}
{{- $_ := set $shim "tls_cert" "/etc/ec-producer/client/tls.crt" -}}
{{- $_ := set $shim "tls_key" "/etc/ec-producer/client/tls.key" -}}
{{- end -}}
{{- end -}}
{{- if $c.tokenSecret }}{{ $_ := set $shim "token_file" (printf "/etc/ec-producer/token/%s" $c.tokenKey) }}{{ end -}}
{{- dict "ec_connector" "ECProducerConnector" "ec_connector_module_path" "consumer_shim.connector" "ec_role" "ec_consumer" "ec_connector_extra_config" $shim | toJson | include "ec-producer.literal" | replace "\"$$(POD_IP)\"" "\"$(POD_IP)\"" -}}
{{- end }}

{{- /* Secrets that a client of the producers needs; volumes and mounts have the same names. */ -}}
{{- define "ec-producer.clientVolumes" -}}
{{- $c := .Values.consumer -}}
{{- if .Values.tls.enabled }}
- name: ca
  secret:
    secretName: {{ $c.tlsCaSecret | quote }}
    defaultMode: 0440
    items: [{key: ca.crt, path: ca.crt}]
{{- if $c.tlsSecret }}
- name: client
  secret:
    secretName: {{ $c.tlsSecret | quote }}
    defaultMode: 0440
    items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
{{- end }}
{{- end }}
{{- if $c.tokenSecret }}
- name: token
  secret:
    secretName: {{ $c.tokenSecret | quote }}
    defaultMode: 0440
    items: [{key: {{ $c.tokenKey | quote }}, path: {{ $c.tokenKey | quote }}}]
{{- end }}
{{- end }}

{{- define "ec-producer.clientMounts" -}}
{{- $c := .Values.consumer -}}
{{- if .Values.tls.enabled }}
- {name: ca, mountPath: /etc/ec-producer/ca, readOnly: true}
{{- if $c.tlsSecret }}
- {name: client, mountPath: /etc/ec-producer/client, readOnly: true}
{{- end }}
{{- end }}
{{- if $c.tokenSecret }}
- {name: token, mountPath: /etc/ec-producer/token, readOnly: true}
{{- end }}
{{- end }}
