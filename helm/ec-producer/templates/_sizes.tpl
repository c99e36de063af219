{{- /* Bytes that each flag allows, as text; written by tests/chart/generate.py. */ -}}
{{- define "ec-producer.sizes" -}}
slot-bytes: ["4096", "1099511627776"]
device-memory-bytes: ["0", "70368744177664"]
pool-bytes: ["1048576", "70368744177664"]
max-queue-bytes: ["4096", "70368744177664"]
max-request-bytes: ["1", "2097152000"]
max-item-bytes: ["1", "1073741824"]
preprocess-memory-bytes: ["268435456", "70368744177664"]
publish-files-bytes: ["1", "1125899906842624"]
{{- end }}
