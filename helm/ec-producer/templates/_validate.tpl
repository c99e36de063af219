{{- /* What the schema cannot say. Each finding names the value, what it is and what is allowed; all are told at once. */ -}}

{{- define "ec-producer.findings" -}}
{{- include "ec-producer.findRequired" . }}
{{- include "ec-producer.findPorts" . }}
{{- include "ec-producer.findSettings" . }}
{{- include "ec-producer.findMemory" . }}
{{- include "ec-producer.findReplicas" . }}
{{- include "ec-producer.findTwice" . }}
{{- include "ec-producer.findConsumer" . }}
{{- end }}

{{- define "ec-producer.findRequired" -}}
{{- $v := .Values -}}
{{- $m := $v.model -}}
{{- if not $v.image.repository }}
image.repository is empty; name the image that was built from the repository's Dockerfile
{{- end }}
{{- if and (eq $m.source "hub") (not $m.name) }}
model.name is empty; with model.source 'hub', name a hub model
{{- end }}
{{- if and (ne $m.source "hub") $m.name }}
model.name is {{ $m.name | quote }}; with model.source '{{ $m.source }}', name the folder by model.path
{{- end }}
{{- if and (eq $m.source "pvc") (not $m.pvc.claim) }}
model.pvc.claim is empty; with model.source 'pvc', name the claim of the volume that has the model
{{- end }}
{{- if and (eq $m.source "init") (not $m.init.image) }}
model.init.image is empty; with model.source 'init', name the image that puts the model onto the volume
{{- end }}
{{- if and $v.tls.enabled (not $v.tls.secret) }}
tls.secret is empty; with tls.enabled, name a secret with tls.crt and tls.key
{{- end }}
{{- if and $v.tls.clientCaSecret (not $v.tls.enabled) }}
tls.clientCaSecret is {{ $v.tls.clientCaSecret | quote }}; it needs tls.enabled
{{- end }}
{{- if and $v.metrics.podMonitor.enabled $v.metrics.serviceMonitor.enabled }}
metrics.podMonitor.enabled and metrics.serviceMonitor.enabled are both true; all would be scraped twice, so choose one
{{- end }}
{{- end }}

{{- define "ec-producer.findPorts" -}}
{{- $v := .Values -}}
{{- $own := list (dict "name" "ports.grpc" "first" (int $v.ports.grpc) "last" (int $v.ports.grpc))
                 (dict "name" "ports.metrics" "first" (int $v.ports.metrics) "last" (int $v.ports.metrics)) -}}
{{- range $name := list "nixl" "mooncake" }}
{{- $one := get $v.transports $name }}
{{- if $one.enabled }}
{{- $first := int $one.ports.first }}
{{- $last := int $one.ports.last }}
{{- if lt (sub $last $first) 9 }}
transports.{{ $name }}.ports are {{ $first }} to {{ $last }}; at least 10 are needed
{{- end }}
{{- range $own }}
{{- if and (le $first .last) (le .first $last) }}
transports.{{ $name }}.ports are {{ $first }} to {{ $last }}; {{ .name }} is among them
{{- end }}
{{- end }}
{{- $own = append $own (dict "name" (printf "transports.%s.ports" $name) "first" $first "last" $last) }}
{{- end }}
{{- end }}
{{- if eq (int $v.ports.grpc) (int $v.ports.metrics) }}
ports.grpc and ports.metrics are both {{ int $v.ports.grpc }}; each needs a port of its own
{{- end }}
{{- end }}

{{- define "ec-producer.findSettings" -}}
{{- $v := .Values -}}
{{- $c := $v.config -}}
{{- range $name, $bounds := include "ec-producer.sizes" . | fromYaml }}
{{- $given := get $c $name }}
{{- if and (hasKey $c $name) (kindIs "string" $given) }}
{{- $bytes := include "ec-producer.bytes" $given | float64 }}
{{- if or (lt $bytes (index $bounds 0 | float64)) (gt $bytes (index $bounds 1 | float64)) }}
config.{{ $name }} is {{ $given | quote }}; allowed are {{ index $bounds 0 }} to {{ index $bounds 1 }} bytes
{{- end }}
{{- end }}
{{- end }}
{{- if and (get $c "compile-mm-encoder") (eq (get $c "fidelity" | toString) "exact") }}
config.compile-mm-encoder is true and config.fidelity 'exact'; compiling changes the last bits
{{- end }}
{{- if eq (get $c "slots" | toString) "1" }}
config.slots is 1; allowed are 0 and 2 or more
{{- end }}
{{- $client := get $c "max-client-items" | default 0 | int }}
{{- $request := get $c "max-items-per-request" | default 64 | int }}
{{- if and (gt $client 0) (lt $client $request) }}
config.max-client-items is {{ $client }}; allowed are 0 and config.max-items-per-request, {{ $request }}, or more
{{- end }}
{{- $exit := get $c "stall-exit-s" | default 60 | float64 }}
{{- if and $v.probes.liveness.enabled (le (float64 $v.probes.liveness.afterSeconds) $exit) }}
probes.liveness.afterSeconds is {{ int $v.probes.liveness.afterSeconds }}; it must be more than config.stall-exit-s, {{ $exit }}
{{- end }}
{{- if and $v.rdma.ipcLock (not $v.rdma.enabled) }}
rdma.ipcLock is true; it needs rdma.enabled
{{- end }}
{{- if and $v.transports.mooncake.enabled (eq $v.transports.mooncake.protocol "rdma") (not $v.rdma.enabled) }}
transports.mooncake.protocol is 'rdma'; it needs rdma.enabled
{{- end }}
{{- end }}

{{- define "ec-producer.findMemory" -}}
{{- $v := .Values -}}
{{- $limits := default dict $v.resources.limits -}}
{{- $requests := default dict $v.resources.requests -}}
{{- with get $limits "memory" }}
{{- $limit := include "ec-producer.bytes" . | int64 }}
{{- $pool := include "ec-producer.bytes" (get $v.config "pool-bytes" | default "1GiB") | int64 }}
{{- $queue := include "ec-producer.bytes" (get $v.config "max-queue-bytes" | default "1GiB") | int64 }}
{{- if gt (add $pool $queue) $limit }}
resources.limits.memory is {{ include "ec-producer.text" . }}; config.pool-bytes and config.max-queue-bytes alone are {{ divf (add $pool $queue) 1073741824 | printf "%.1f" }} GiB
{{- end }}
{{- end }}
{{- $all := concat (keys $limits) (keys $requests) }}
{{- if and $v.hugepages.size (not (or (has "memory" $all) (has "cpu" $all))) }}
hugepages.size is {{ $v.hugepages.size | quote }}; Kubernetes wants resources for cpu or memory beside them
{{- end }}
{{- end }}

{{- define "ec-producer.findReplicas" -}}
{{- $v := .Values -}}
{{- $a := $v.autoscaling -}}
{{- $fewest := ternary $v.workload.replicas $a.minReplicas (eq $a.kind "none") | int -}}
{{- if and (ne $a.kind "none") (gt (int $a.minReplicas) (int $a.maxReplicas)) }}
autoscaling.minReplicas is {{ int $a.minReplicas }}; allowed are 1 to autoscaling.maxReplicas, {{ int $a.maxReplicas }}
{{- end }}
{{- if $v.pdb.enabled }}
{{- $least := include "ec-producer.text" $v.pdb.minAvailable }}
{{- $most := include "ec-producer.text" $v.pdb.maxUnavailable }}
{{- if and $least (or (eq $least "100%") (and (not (hasSuffix "%" $least)) (ge (int $least) $fewest))) }}
pdb.minAvailable is {{ $least }} of {{ $fewest }} replicas; no node with one could be drained
{{- end }}
{{- if and (not $least) (has $most (list "" "0" "0%")) }}
pdb.maxUnavailable is {{ $most | quote }}; no node with a pod could be drained
{{- end }}
{{- end }}
{{- $none := list "" "0" "0%" }}
{{- if and (eq $v.workload.kind "Deployment") (has (include "ec-producer.text" $v.workload.maxSurge) $none) (has (include "ec-producer.text" $v.workload.maxUnavailable) $none) }}
workload.maxSurge and workload.maxUnavailable are both 0; no update could begin
{{- end }}
{{- end }}

{{- define "ec-producer.findTwice" -}}
{{- $v := .Values -}}
{{- $flags := dict -}}
{{- range include "ec-producer.args" . | fromYamlArray }}
{{- $flag := splitList "=" . | first }}
{{- if and (hasPrefix "--" $flag) (ne $flag "--transport") }}
{{- if hasKey $flags $flag }}
extraArgs has {{ $flag }}, which is set already; use the value that sets it
{{- end }}
{{- $_ := set $flags $flag true }}
{{- end }}
{{- end }}
{{- range $name, $list := dict "extraEnv" $v.extraEnv "consumer.extraEnv" $v.consumer.extraEnv "model.init.env" $v.model.init.env }}
{{- $seen := dict }}
{{- range $list }}
{{- if hasKey $seen .name }}
{{ $name }} has {{ .name }} twice
{{- end }}
{{- $_ := set $seen .name true }}
{{- end }}
{{- end }}
{{- $volumes := dict }}
{{- range include "ec-producer.volumes" . | fromYamlArray }}
{{- if hasKey $volumes .name }}
extraVolumes has {{ .name }}, a name that is taken
{{- end }}
{{- $_ := set $volumes .name true }}
{{- end }}
{{- $paths := dict }}
{{- range include "ec-producer.volumeMounts" . | fromYamlArray }}
{{- if hasKey $paths .mountPath }}
{{ .mountPath }} is where two volumes are mounted: {{ get $paths .mountPath }} and {{ .name }}
{{- end }}
{{- if not (hasKey $volumes .name) }}
extraVolumeMounts has {{ .name }}, which is no volume
{{- end }}
{{- $_ := set $paths .mountPath .name }}
{{- end }}
{{- $containers := dict "producer" true }}
{{- range $v.extraContainers }}
{{- if hasKey $containers .name }}
extraContainers has {{ .name }}, a name that is taken
{{- end }}
{{- $_ := set $containers .name true }}
{{- end }}
{{- end }}

{{- define "ec-producer.findConsumer" -}}
{{- $v := .Values -}}
{{- $c := $v.consumer -}}
{{- if $c.enabled }}
{{- $most := include "ec-producer.maxReplicas" . | int }}
{{- if and (eq $v.workload.kind "Deployment") (gt $most 1) }}
workload.kind is 'Deployment' with up to {{ $most }} replicas; a consumer needs an address for each of them, so with consumer.enabled make it a StatefulSet
{{- end }}
{{- if and $v.tls.enabled (not $c.tlsCaSecret) }}
consumer.tlsCaSecret is empty; with tls.enabled, name a secret with ca.crt
{{- end }}
{{- if and $v.tls.clientCaSecret (not $c.tlsSecret) }}
consumer.tlsSecret is empty; with tls.clientCaSecret, name a secret with the consumer's tls.crt and tls.key
{{- end }}
{{- if and $v.tokens.secret (not $c.tokenSecret) }}
consumer.tokenSecret is empty; with tokens.secret, name a secret with the consumer's token
{{- end }}
{{- end }}
{{- end }}
