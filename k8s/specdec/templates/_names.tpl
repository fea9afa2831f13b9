{{/* Names, labels and the few facts that several templates go by. */}}

{{- define "specdec.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* KubeRay appends to it, and cuts what is beyond 50 characters. */}}
{{- define "specdec.fullname" -}}
{{- $name := include "specdec.name" . -}}
{{- $of_release := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $of_release .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "specdec.serveService" -}}
{{ include "specdec.fullname" . }}-serve-svc
{{- end -}}

{{/* Of every object but pods. */}}
{{- define "specdec.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
app.kubernetes.io/name: {{ include "specdec.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
app.kubernetes.io/part-of: specdec
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
Of Ray's pods, and what selects them. Nothing here may change from one version of the chart to the
next: KubeRay answers a change of pods with a new cluster. app.kubernetes.io/name is KubeRay's.
*/}}
{{- define "specdec.selector" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: specdec
{{- end -}}

{{/* Of the pod of `helm test`, which is none of Ray's. */}}
{{- define "specdec.testSelector" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: test
{{- end -}}

{{/* There are two of a version: the one for GPUs has CUDA. */}}
{{- define "specdec.image" -}}
{{- $version := ternary (printf "%s-cuda" .Chart.AppVersion) .Chart.AppVersion (eq (include "specdec.hasGpus" .) "true") -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default $version .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "specdec.serviceAccount" -}}
{{- $own := ternary (include "specdec.fullname" .) "default" .Values.serviceAccount.create -}}
{{- default $own .Values.serviceAccount.name -}}
{{- end -}}

{{- define "specdec.tlsSecret" -}}
{{- default (printf "%s-tls" (include "specdec.fullname" .)) .Values.tls.secretName -}}
{{- end -}}

{{- define "specdec.apiKeysSecret" -}}
{{- default (printf "%s-api-keys" (include "specdec.fullname" .)) .Values.auth.apiKeys.existingSecret -}}
{{- end -}}

{{- define "specdec.adminTokenSecret" -}}
{{- default (printf "%s-admin-token" (include "specdec.fullname" .)) .Values.auth.adminToken.existingSecret -}}
{{- end -}}

{{/* A mapping over its defaults, key by key. Helm's own merge takes false and 0 for missing. */}}
{{- define "specdec.merged" -}}
{{- $merged := deepCopy (index . 0) -}}
{{- range $key, $value := index . 1 -}}
{{- $default := get $merged $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $default) -}}
{{- $_ := set $merged $key (include "specdec.merged" (list $default $value) | fromJson) -}}
{{- else -}}
{{- $_ := set $merged $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $merged -}}
{{- end -}}

{{- define "specdec.defaults" -}}
{{- .Files.Get "files/defaults.json" -}}
{{- end -}}

{{/* The worker groups that there are, with every value, as {"NAME": ...}. */}}
{{- define "specdec.groups" -}}
{{- $default := get (include "specdec.defaults" . | fromJson) "workerGroup" -}}
{{- $groups := dict -}}
{{- range $name, $given := .Values.workerGroups -}}
{{- $group := include "specdec.merged" (list $default $given) | fromJson -}}
{{- if $group.enabled -}}
{{- $_ := set $groups $name $group -}}
{{- end -}}
{{- end -}}
{{- toJson $groups -}}
{{- end -}}

{{/* Whether some worker has a GPU: "true" or nothing. */}}
{{- define "specdec.hasGpus" -}}
{{- $found := false -}}
{{- range $name, $group := include "specdec.groups" . | fromJson -}}
{{- $found = or $found (gt (int $group.gpu.count) 0) -}}
{{- end -}}
{{- if $found }}true{{ end -}}
{{- end -}}

{{/* The models with every value, each with the name of its application, as {"models": [...]}. */}}
{{- define "specdec.models" -}}
{{- $default := get (include "specdec.defaults" . | fromJson) "model" -}}
{{- $device := ternary "cuda" "cpu" (eq (include "specdec.hasGpus" .) "true") -}}
{{- $models := list -}}
{{- range $index, $given := .Values.models -}}
{{- $model := include "specdec.merged" (list $default $given) | fromJson -}}
{{- $application := regexReplaceAll "[^a-z0-9]+" (lower $model.name) "-" | trunc 50 | trimAll "-" -}}
{{- $_ := set $model "application" $application -}}
{{- $_ := set $model "device" (default $device $model.device) -}}
{{- $own := ternary "/" (printf "/%s" $application) (eq $index 0) -}}
{{- $_ := set $model "routePrefix" (default $own $model.routePrefix) -}}
{{- $models = append $models $model -}}
{{- end -}}
{{- toJson (dict "models" $models) -}}
{{- end -}}

{{/* The ranks of a model's draft, each of which takes a GPU where the target does. */}}
{{- define "specdec.draftRanks" -}}
{{- $speculation := .speculativeConfig -}}
{{- if kindIs "map" $speculation -}}
{{- if eq (default "" $speculation.method) "draft_model" -}}
{{- default 1 $speculation.draft_tensor_parallel_size -}}
{{- else -}}0{{- end -}}
{{- else -}}0{{- end -}}
{{- end -}}
