{{- /* What the pod mounts. Secrets are mounted as folders, so that a change in them is seen. */ -}}

{{- define "ec-producer.volumes" -}}
{{- $v := .Values -}}
{{ include "ec-producer.scratchVolumes" (dict "scratch" $v.scratch "shm" $v.shm.sizeLimit) }}
{{ include "ec-producer.modelVolume" . }}
{{- if $v.tls.enabled }}
- name: tls
  secret:
    secretName: {{ $v.tls.secret | quote }}
    defaultMode: 0440
    items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
{{- if $v.tls.clientCaSecret }}
- name: client-ca
  secret:
    secretName: {{ $v.tls.clientCaSecret | quote }}
    defaultMode: 0440
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- end }}
{{- if $v.tokens.secret }}
- name: tokens
  secret:
    secretName: {{ $v.tokens.secret | quote }}
    defaultMode: 0440
    items: [{key: {{ $v.tokens.key | quote }}, path: {{ $v.tokens.key | quote }}}]
{{- end }}
{{- if $v.hugepages.size }}
- name: hugepages
  emptyDir: {medium: HugePages-{{ $v.hugepages.size }}}
{{- end }}
{{- if $v.files.claim }}
- name: files
  persistentVolumeClaim: {claimName: {{ $v.files.claim | quote }}}
{{- end }}
{{- with $v.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "ec-producer.volumeMounts" -}}
{{- $v := .Values -}}
{{ include "ec-producer.scratchMounts" . }}
{{ include "ec-producer.modelMount" . }}
{{- if $v.tls.enabled }}
- {name: tls, mountPath: /etc/ec-producer/tls, readOnly: true}
{{- if $v.tls.clientCaSecret }}
- {name: client-ca, mountPath: /etc/ec-producer/client-ca, readOnly: true}
{{- end }}
{{- end }}
{{- if $v.tokens.secret }}
- {name: tokens, mountPath: /etc/ec-producer/tokens, readOnly: true}
{{- end }}
{{- if $v.hugepages.size }}
- {name: hugepages, mountPath: /dev/hugepages}
{{- end }}
{{- if $v.files.claim }}
- {name: files, mountPath: {{ $v.files.mountPath | quote }}}
{{- end }}
{{- with $v.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* What is written to: the root file system is read-only. Takes scratch and shm. */ -}}
{{- define "ec-producer.scratchVolumes" -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .scratch.tmpSizeLimit }}}
- name: home
  emptyDir: {sizeLimit: {{ .scratch.homeSizeLimit }}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .shm }}}
{{- end }}

{{- define "ec-producer.scratchMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/ec-producer}
- {name: shm, mountPath: /dev/shm}
{{- end }}

{{- define "ec-producer.modelVolume" -}}
{{- $m := .Values.model -}}
{{- $claim := ternary $m.hub.cacheClaim (ternary $m.pvc.claim $m.init.claim (eq $m.source "pvc")) (eq $m.source "hub") -}}
- name: model
{{- if $claim }}
  persistentVolumeClaim: {claimName: {{ $claim | quote }}{{ if eq $m.source "pvc" }}, readOnly: true{{ end }}}
{{- else }}
  emptyDir: {sizeLimit: {{ ternary $m.hub.cacheSizeLimit $m.init.sizeLimit (eq $m.source "hub") }}}
{{- end }}
{{- end }}

{{- define "ec-producer.modelMount" -}}
{{- $m := .Values.model -}}
- name: model
  mountPath: {{ $m.mountPath | quote }}
{{- if eq $m.source "pvc" }}
  readOnly: true
{{- with $m.pvc.subPath }}
  subPath: {{ . | quote }}
{{- end }}
{{- else if eq $m.source "init" }}
  readOnly: true
{{- end }}
{{- end }}
