{{- define "agentrl.labels" -}}
app.kubernetes.io/part-of: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "agentrl.controllerImage" -}}
{{- $image := .Values.controller.image }}
{{- range $name := keys .Values.tasks | sortAlpha }}
{{- if not $image }}{{ $image = (get $.Values.tasks $name).image }}{{ end }}
{{- end }}
{{- required "give controller.image, or a task with an image" $image }}
{{- end }}

{{- define "agentrl.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "agentrl.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "agentrl.probes" -}}
startupProbe: {httpGet: {path: /health, port: http}, periodSeconds: 2, failureThreshold: 60}
readinessProbe: {httpGet: {path: /ready, port: http}, periodSeconds: 5}
livenessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
{{- end }}
