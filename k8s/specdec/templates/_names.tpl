{{/* Names, labels, and values with their defaults, which several templates use. */}}

{{- define "specdec.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 40 characters: KubeRay appends suffixes, and truncates at 50. */}}
{{- define "specdec.fullname" -}}
{{- $name := include "specdec.name" . -}}
{{- $of_release := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $of_release .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "specdec.serveService" -}}
{{ include "specdec.fullname" . }}-serve-svc
{{- end -}}

{{/* The address on which servers listen, that of the pod itself, and all addresses as a CIDR. */}}
{{- define "specdec.anyHost" -}}
{{- ternary "::" "0.0.0.0" (eq .Values.ipFamily "IPv6") -}}
{{- end -}}

{{- define "specdec.ownHost" -}}
{{- ternary "::1" "127.0.0.1" (eq .Values.ipFamily "IPv6") -}}
{{- end -}}

{{- define "specdec.cidr" -}}
{{- default (printf "%s/0" (include "specdec.anyHost" .root)) .given -}}
{{- end -}}

{{/* Metadata of every object except pods. Takes root, the name, and labels of this object if it has any. */}}
{{- define "specdec.metadata" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 | quote }}
namespace: {{ $root.Release.Namespace | quote }}
labels:
  {{- include "specdec.labels" (list $root (index (append . dict) 2)) | nindent 2 }}
{{- end -}}

{{/* Labels of every object except pods. Takes root and others. Users' labels replace the chart's. */}}
{{- define "specdec.labels" -}}
{{- $root := index . 0 -}}
{{- merge dict (default dict (index . 1)) (default dict $root.Values.commonLabels) (include "specdec.ownLabels" $root | fromYaml) | toYaml -}}
{{- end -}}

{{- define "specdec.ownLabels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
app.kubernetes.io/name: {{ include "specdec.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
app.kubernetes.io/part-of: specdec
{{- end -}}

{{/*
Labels of Ray's pods, also used as their selector. They must not depend on the chart's version:
KubeRay starts a new cluster if pods change. KubeRay itself sets app.kubernetes.io/name.
*/}}
{{- define "specdec.selector" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: specdec
{{- end -}}

{{/* Labels of the pod of `helm test`, which is not one of Ray's. */}}
{{- define "specdec.testSelector" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: test
{{- end -}}

{{/* Each version has two images: the one for GPUs contains CUDA. */}}
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

{{/*
Merges a mapping over its defaults recursively; null removes a default. Helm's own merge ignores
false and 0.
*/}}
{{- define "specdec.merged" -}}
{{- $merged := deepCopy (index . 0) -}}
{{- range $key, $value := index . 1 -}}
{{- $default := get $merged $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $default) -}}
{{- $_ := set $merged $key (include "specdec.merged" (list $default $value) | fromJson) -}}
{{- else if kindIs "invalid" $value -}}
{{- $_ := unset $merged $key -}}
{{- else -}}
{{- $_ := set $merged $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $merged -}}
{{- end -}}

{{/* The own entries of a list (YAML), with those of a value in place of those with an equal key. */}}
{{- define "specdec.replaced" -}}
{{- $extra := default list (get .values .extra) -}}
{{- $taken := list -}}
{{- range $extra -}}
{{- if has (get . $.key) $taken -}}
{{- fail (printf "%s: two entries have the %s %s; remove one" $.extra $.key (get . $.key)) -}}
{{- end -}}
{{- $taken = append $taken (get . $.key) -}}
{{- end -}}
{{- $kept := list -}}
{{- range fromYamlArray .own -}}
{{- if not (has (get . $.key) $taken) -}}
{{- $kept = append $kept . -}}
{{- end -}}
{{- end -}}
{{- toYaml (concat $kept $extra) -}}
{{- end -}}

{{/*
The given resources of CPU and memory, with defaults that contradict none: a limit is at least the
given request, a request at most the given limit.
*/}}
{{- define "specdec.givenResources" -}}
{{- $resources := include "specdec.merged" . | fromJson -}}
{{- $given := default dict (index . 1) -}}
{{- range $name, $request := $resources.requests -}}
{{- with get $resources.limits $name -}}
{{- if gt (include "specdec.quantity" $request | float64) (include "specdec.quantity" . | float64) -}}
{{- if not (hasKey (default dict $given.limits) $name) -}}
{{- $_ := set $resources.limits $name $request -}}
{{- else if not (hasKey (default dict $given.requests) $name) -}}
{{- $_ := set $resources.requests $name . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $resources -}}
{{- end -}}

{{/* A Kubernetes quantity, such as 500m or 64Gi, as a number. */}}
{{- define "specdec.quantity" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9.]+([eE][+-]?[0-9]+)?" $text -}}
{{- $factors := dict "n" 1e-9 "u" 1e-6 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- mulf (float64 $number) (default 1 (get $factors (trimPrefix $number $text))) -}}
{{- end -}}

{{/*
Helm removes values that are null. Put what they stand for in their place: off, empty, or the default.
Every template begins with this, since any of them may be the first.
*/}}
{{- define "specdec.complete" -}}
{{- $absent := (include "specdec.defaults" . | fromJson).absent -}}
{{- include "specdec.completed" (dict "values" .Values "absent" $absent "prefix" "") -}}
{{- end -}}

{{- define "specdec.completed" -}}
{{- range $key, $absent := .absent -}}
{{- $at := print $.prefix $key -}}
{{- if kindIs "invalid" (index $.values $key) -}}
{{- $_ := set $.values $key (ternary dict $absent (kindIs "map" $absent)) -}}
{{- end -}}
{{- if kindIs "map" $absent -}}
{{- include "specdec.completed" (dict "values" (index $.values $key) "absent" $absent "prefix" (print $at ".")) -}}
{{- else if kindIs "invalid" (index $.values $key) -}}
{{- fail (printf "%s: must not be null, which would leave the service unprotected; write its value" $at) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "specdec.defaults" -}}
{{- .Files.Get "files/defaults.json" -}}
{{- end -}}

{{/*
The enabled worker groups with all values, as {"NAME": ...}. Helm has merged the resources of those in
values.yaml with its defaults, and removed the ones that are null.
*/}}
{{- define "specdec.groups" -}}
{{- $defaults := include "specdec.defaults" . | fromJson -}}
{{- $default := $defaults.workerGroup -}}
{{- $groups := dict -}}
{{- range $name, $given := .Values.workerGroups -}}
{{- $group := include "specdec.merged" (list $default $given) | fromJson -}}
{{- if and (kindIs "map" $given.resources) (has $name $defaults.groupsInValues) -}}
{{- $_ := set $group "resources" $given.resources -}}
{{- else -}}
{{- $_ := set $group "resources" (include "specdec.givenResources" (list $default.resources (default dict $given.resources)) | fromJson) -}}
{{- end -}}
{{- $is_counted := regexMatch "gpu$|^nvidia\\.com/mig-[0-9]+g\\.[0-9]+gb$" $group.gpu.resource -}}
{{- if and (gt (int $group.gpu.count) 0) (not $is_counted) -}}
{{- /* KubeRay passes only GPUs with such a name to Ray. */ -}}
{{- $_ := set $group "rayStartParams" (merge dict $group.rayStartParams (dict "num-gpus" (toString $group.gpu.count))) -}}
{{- end -}}
{{- if $group.enabled -}}
{{- $_ := set $groups $name $group -}}
{{- end -}}
{{- end -}}
{{- toJson $groups -}}
{{- end -}}

{{/* The port of hub.endpoint, or that of its scheme. */}}
{{- define "specdec.hubPort" -}}
{{- $url := urlParse .Values.hub.endpoint -}}
{{- default (ternary "80" "443" (eq $url.scheme "http")) (regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host)) -}}
{{- end -}}

{{/* "true" if a worker group has GPUs, else empty. */}}
{{- define "specdec.hasGpus" -}}
{{- $found := false -}}
{{- range $name, $group := include "specdec.groups" . | fromJson -}}
{{- $found = or $found (gt (int $group.gpu.count) 0) -}}
{{- end -}}
{{- if $found }}true{{ end -}}
{{- end -}}

{{/* The models with all values and the name of their application, as {"models": [...]}. */}}
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

{{/*
The number of ranks of a model's draft model, whatever its role; on GPUs each needs one. 0 without a
draft model, and where the configuration has no method, which is draft_model for some keys.
*/}}
{{- define "specdec.draftRanks" -}}
{{- $speculation := ternary .speculativeConfig dict (kindIs "map" .speculativeConfig) -}}
{{- $ranks := 0 -}}
{{- range $role := pick $speculation "method" "first" "fallback" -}}
{{- $keys := ternary $role (merge (dict "method" $role) $speculation) (kindIs "map" $role) -}}
{{- if eq (default "" $keys.method) "draft_model" -}}
{{- $ranks = default 1 $keys.draft_tensor_parallel_size | int -}}
{{- end -}}
{{- end -}}
{{- $ranks -}}
{{- end -}}

{{/* Most replicas of a model, for which there are draft workers where replicas share them. */}}
{{- define "specdec.mostReplicas" -}}
{{- ternary .autoscaling.maxReplicas .replicas .autoscaling.enabled | int -}}
{{- end -}}
