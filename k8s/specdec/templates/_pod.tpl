{{/* Pods of the Ray cluster: the parts that the head and the workers share. */}}

{{/* A pod template. Takes root, group (its values), name, kind (head or worker). */}}
{{- define "specdec.podTemplate" -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "specdec.podLabels" . | nindent 4 }}
  {{- with .group.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "specdec.serviceAccount" .root | quote }}
  {{- include "specdec.everyPod" .root | nindent 2 }}
  # The preStop hook, and 30 s in which Ray and Serve's replicas stop.
  terminationGracePeriodSeconds: {{ include "specdec.hookSeconds" . | int | add 30 }}
  {{- with include "specdec.scheduling" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if include "specdec.runsModels" . }}
  {{- with include "specdec.modelCopies" .root }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- end }}
  containers:
    - {{ include "specdec.rayContainer" . | nindent 6 | trim }}
    {{- if and (eq $values.tls.mode "sidecar") (include "specdec.takesRequests" .) }}
    - {{ include "specdec.sidecar" . | nindent 6 | trim }}
    {{- end }}
  volumes:
    {{- include "specdec.replaced" (dict "own" (include "specdec.volumes" .) "values" $values "extra" "extraVolumes" "key" "name") | nindent 4 }}
{{- end -}}

{{/* Settings of every pod of the chart. */}}
{{- define "specdec.everyPod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- toYaml .Values.security.podSecurityContext | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "specdec.podLabels" -}}
{{ include "specdec.selector" .root }}
app.kubernetes.io/component: {{ .name | quote }}
{{- with .group.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* "true" for pods of the Service; the others have no port of that name. */}}
{{- define "specdec.takesRequests" -}}
{{- if or (eq .kind "head") (ne (default "" .group.role) "draft") }}true{{ end -}}
{{- end -}}

{{/* "true" for pods on which models may run, which mount the volumes of models and cache. */}}
{{- define "specdec.runsModels" -}}
{{- if or (eq .kind "worker") (and (eq .kind "head") .root.Values.head.schedulable) }}true{{ end -}}
{{- end -}}

{{/* Scheduling of pods that are not Ray's: where the head may run. */}}
{{- define "specdec.besideHead" -}}
{{- $group := pick .Values.head "nodeSelector" "tolerations" "affinity" "priorityClassName" -}}
{{- include "specdec.scheduling" (dict "root" . "group" $group "name" "" "kind" "") | trim -}}
{{- end -}}

{{- define "specdec.scheduling" }}
{{- $affinity := include "specdec.affinity" . | fromJson -}}
{{- $selector := .group.nodeSelector -}}
{{- with .group.gpu -}}
{{- if and (gt (int .count) 0) .product -}}
{{- $selector = merge (dict .productLabel .product) $selector -}}
{{- end -}}
{{- end -}}
{{- with $selector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{- toYaml . | nindent 4 }}
    {{- if not (hasKey . "labelSelector") }}
    labelSelector:
      matchLabels:
        {{- include "specdec.selector" $.root | nindent 8 }}
        app.kubernetes.io/component: {{ $.name | quote }}
    {{- end }}
  {{- end }}
{{- end }}
{{- with .group.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .group.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end -}}

{{/*
The group's affinity, plus pod affinity to the pods with which it shares a claim that only one node
can mount. The head's state always counts as one: it is a database that only one node may write.
*/}}
{{- define "specdec.affinity" -}}
{{- $affinity := deepCopy (default dict .group.affinity) -}}
{{- $selector := include "specdec.selector" .root | fromYaml -}}
{{- $terms := list -}}
{{- if and (eq .kind "head") (eq .root.Values.storage.state.type "claim") -}}
{{- $head := merge (dict "app.kubernetes.io/component" "head") $selector -}}
{{- $terms = append $terms (dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" $head)) -}}
{{- end -}}
{{- if and (include "specdec.runsModels" .) (include "specdec.claimOfOneNode" .root) -}}
{{- $pods := dict "matchLabels" $selector -}}
{{- if not .root.Values.head.schedulable -}}
{{- $_ := set $pods "matchExpressions" (list (dict "key" "app.kubernetes.io/component" "operator" "NotIn" "values" (list "head"))) -}}
{{- end -}}
{{- $terms = append $terms (dict "topologyKey" "kubernetes.io/hostname" "labelSelector" $pods) -}}
{{- end -}}
{{- if $terms -}}
{{- $together := default dict $affinity.podAffinity -}}
{{- $own := default list $together.requiredDuringSchedulingIgnoredDuringExecution -}}
{{- $_ := set $together "requiredDuringSchedulingIgnoredDuringExecution" (concat $own $terms) -}}
{{- $_ := set $affinity "podAffinity" $together -}}
{{- end -}}
{{- toJson $affinity -}}
{{- end -}}

{{/* Which of the volumes models and cache are claims that only one node can mount; empty for none. */}}
{{- define "specdec.claimOfOneNode" -}}
{{- $found := list -}}
{{- range $name := list "models" "cache" -}}
{{- with get $.Values.storage $name -}}
{{- $read_by_many := and .readOnly (has "ReadOnlyMany" .accessModes) -}}
{{- if and (eq .type "claim") (not (has "ReadWriteMany" .accessModes)) (not $read_by_many) -}}
{{- $found = append $found $name -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- join " and " $found -}}
{{- end -}}

{{- define "specdec.modelCopies" -}}
{{- with .Values.modelImages -}}
{{- $default := get (include "specdec.defaults" $ | fromJson) "modelImage" -}}
initContainers:
  {{- range . }}
  {{- $copy := include "specdec.merged" (list $default .) | fromJson }}
  - name: copy-{{ $copy.name | replace "." "-" | trunc 50 | trimSuffix "-" }}
    image: {{ $copy.image | quote }}
    imagePullPolicy: {{ $copy.pullPolicy }}
    securityContext:
      {{- toYaml $.Values.security.containerSecurityContext | nindent 6 }}
    # Several pods may copy to one claim at once: each copies to its own directory, and the first wins.
    command:
      - sh
      - -ec
      - |
        [ ! -e "$TARGET" ] || exit 0
        rm -rf "$TARGET.$POD"
        cp -R "$SOURCE" "$TARGET.$POD"
        mv -T "$TARGET.$POD" "$TARGET" || { rm -rf "$TARGET.$POD"; [ -e "$TARGET" ]; }
    env:
      - {name: SOURCE, value: {{ $copy.path | quote }}}
      - {name: TARGET, value: {{ printf "%s/%s" $.Values.storage.models.mountPath $copy.name | quote }}}
      - name: POD
        valueFrom: {fieldRef: {fieldPath: metadata.name}}
    resources:
      requests: {cpu: 250m, memory: 256Mi}
      limits: {cpu: "1", memory: 1Gi}
    volumeMounts:
      - {name: models, mountPath: {{ $.Values.storage.models.mountPath }}}
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "specdec.volumes" -}}
{{- $values := .root.Values -}}
{{- $fullname := include "specdec.fullname" .root -}}
- name: scratch
  emptyDir: {sizeLimit: {{ $values.storage.scratchSize | quote }}}
# The name under which KubeRay's autoscaler expects the volume of the logs.
- name: ray-logs
  emptyDir: {sizeLimit: {{ $values.storage.scratchSize | quote }}}
{{- if include "specdec.runsModels" . }}
{{ include "specdec.volume" (list "models" $values.storage.models $fullname) }}
{{ include "specdec.volume" (list "cache" $values.storage.cache $fullname) }}
{{- with $values.hub.token }}
{{- if .name }}
- name: hub-token
  secret:
    secretName: {{ .name | quote }}
    defaultMode: 0440
    items:
      - {key: {{ .key | quote }}, path: token}
{{- end }}
{{- end }}
{{- end }}
{{- if eq .kind "head" }}
{{ include "specdec.volume" (list "state" $values.storage.state $fullname) }}
{{- if $values.ray.autoscaler.enabled }}
{{ include "specdec.apiTokenVolume" . }}
- name: autoscaler-scratch
  emptyDir: {sizeLimit: 1Gi}
{{- end }}
{{- end }}
{{ include "specdec.authVolumes" .root }}
{{- if and (eq $values.tls.mode "sidecar") (include "specdec.takesRequests" .) }}
- name: tls
  secret: {secretName: {{ include "specdec.tlsSecret" .root | quote }}, defaultMode: 0440}
- name: envoy
  configMap: {name: {{ $fullname }}-envoy}
{{- end }}
{{- end -}}

{{/* The volumes of specdec.authMounts. */}}
{{- define "specdec.authVolumes" -}}
{{- if .Values.auth.apiKeys.enabled }}
- name: api-keys
  secret: {secretName: {{ include "specdec.apiKeysSecret" . | quote }}, defaultMode: 0440}
{{- end }}
{{- if .Values.auth.adminToken.enabled }}
- name: admin-token
  secret: {secretName: {{ include "specdec.adminTokenSecret" . | quote }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* A volume of the storage values. Takes its name, its values and the release's name. */}}
{{- define "specdec.volume" -}}
{{- $name := index . 0 -}}
{{- $fullname := index . 2 -}}
{{- with index . 1 -}}
- name: {{ $name }}
{{- if eq .type "claim" }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-%s" $fullname $name) .existingClaim | quote }}
{{- else if eq .type "volume" }}
  {{- toYaml .volume | nindent 2 }}
{{- else }}
  emptyDir: {sizeLimit: {{ .size | quote }}}
{{- end }}
{{- end -}}
{{- end -}}

{{/* The token for the Kubernetes API, which only the container of the autoscaler mounts. */}}
{{- define "specdec.apiTokenVolume" -}}
- name: api-token
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap:
          name: kube-root-ca.crt
          items:
            - {key: ca.crt, path: ca.crt}
      - downwardAPI:
          items:
            - path: namespace
              fieldRef: {fieldPath: metadata.namespace}
{{- end -}}
