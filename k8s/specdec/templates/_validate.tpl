{{/*
What the schema cannot say, since it takes two values to be wrong. Every message says what to write.
*/}}

{{- define "specdec.validate" -}}
{{- include "specdec.validateModels" . -}}
{{- include "specdec.validateGroups" . -}}
{{- include "specdec.validateImage" . -}}
{{- include "specdec.validateGpus" . -}}
{{- include "specdec.validateStorage" . -}}
{{- include "specdec.validateWaysIn" . -}}
{{- include "specdec.validateNetwork" . -}}
{{- include "specdec.validateOperation" . -}}
{{- end -}}

{{- define "specdec.validateModels" -}}
{{- $seen := dict -}}
{{- range $index, $model := (include "specdec.models" . | fromJson).models -}}
{{- $at := printf "models[%d]" $index -}}
{{- $application := $model.application -}}
{{- if hasKey $seen $application -}}
{{- fail (printf "%s.name: %q is, as an application's name (%s), that of another model; give each a name of its own" $at $model.name $application) -}}
{{- end -}}
{{- if hasKey $seen $model.routePrefix -}}
{{- fail (printf "%s.routePrefix: %q is another model's; write /%s, or leave it empty" $at $model.routePrefix $application) -}}
{{- end -}}
{{- $_ := set $seen $application true -}}
{{- $_ = set $seen $model.routePrefix true -}}
{{- with $model.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "%s.autoscaling.minReplicas: %d is more than maxReplicas (%d); write at most that" $at (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $model.device "cuda") (ne (default "none" $model.settings.quantization) "none") -}}
{{- fail (printf "%s.settings.quantization: %s runs on a CPU; leave it out, or set %s.device to cpu" $at $model.settings.quantization $at) -}}
{{- end -}}
{{- if and (eq (default "auto" $model.settings.kernels) "torch") (eq (default "none" $model.settings.quantization) "w8a8") -}}
{{- fail (printf "%s.settings.quantization: w8a8 needs native kernels; write int8, or leave %s.settings.kernels out" $at $at) -}}
{{- end -}}
{{- end -}}
{{- if not (hasKey $seen "/") -}}
{{- fail "models: none has the routePrefix /, where /health and /metrics are looked for; leave it empty for the first" -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateGroups" -}}
{{- $groups := include "specdec.groups" . | fromJson -}}
{{- if and (not $groups) (not .Values.head.schedulable) -}}
{{- fail "head.schedulable: there is no worker group, so nothing could run; enable one below workerGroups, or write true" -}}
{{- end -}}
{{- range $name, $group := $groups -}}
{{- $at := printf "workerGroups.%s" $name -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]{0,20}[a-z0-9])?$" $name) -}}
{{- fail (printf "%s: a group's name has lower case letters, digits and dashes, at most 22 of them; write another" $at) -}}
{{- end -}}
{{- if eq $name "head" -}}
{{- fail "workerGroups.head: the head has values of its own, under head; write another name" -}}
{{- end -}}
{{- if gt (int $group.minReplicas) (int $group.maxReplicas) -}}
{{- fail (printf "%s.minReplicas: %d is more than maxReplicas (%d); write at most that" $at (int $group.minReplicas) (int $group.maxReplicas)) -}}
{{- end -}}
{{- if or (lt (int $group.replicas) (int $group.minReplicas)) (gt (int $group.replicas) (int $group.maxReplicas)) -}}
{{- fail (printf "%s.replicas: %d is not from minReplicas (%d) to maxReplicas (%d); raise maxReplicas, or write a number between them" $at (int $group.replicas) (int $group.minReplicas) (int $group.maxReplicas)) -}}
{{- end -}}
{{- if and (not $.Values.ray.autoscaler.enabled) (ne (int $group.replicas) (int $group.maxReplicas)) -}}
{{- fail (printf "%s.maxReplicas: without ray.autoscaler nothing adds pods to the %d of replicas; write %d, or enable ray.autoscaler" $at (int $group.replicas) (int $group.replicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateImage" -}}
{{- range $name, $group := include "specdec.groups" . | fromJson -}}
{{- if and (gt (int $group.gpu.count) 0) (not (hasPrefix "nvidia.com/" $group.gpu.resource)) (not $.Values.image.tag) (not $.Values.image.digest) -}}
{{- fail (printf "image.tag: the default for GPUs has CUDA, and workerGroups.%s takes %s; write the tag or digest of an image of your own" $name $group.gpu.resource) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateGpus" -}}
{{- range (include "specdec.gpuParts" . | fromJson).parts -}}
{{- $pool := include "specdec.gpuPool" (dict "root" $ "labels" .labels) | fromJson -}}
{{- $pods := ternary (printf "with %s" .labels) "there is" (ne .labels "") -}}
{{- if and (eq (int $pool.largest) 0) (eq .labels "") -}}
{{- fail (printf "models[%d].device: no worker group has GPUs; set gpu.count below workerGroups, or write cpu" (int .model)) -}}
{{- end -}}
{{- if gt (int .ranks) (int $pool.largest) -}}
{{- fail (printf "%s: %d shards have to be in one pod, and the largest %s has %d GPUs; write at most that, or raise a gpu.count below workerGroups" .at (int .ranks) $pods (int $pool.largest)) -}}
{{- end -}}
{{- end -}}
{{- $needed := 0 -}}
{{- range $labels, $gpus := include "specdec.gpusWanted" (dict "root" . "kind" "") | fromJson -}}
{{- $needed = add $needed (int $gpus) -}}
{{- $pool := include "specdec.gpuPool" (dict "root" $ "labels" $labels) | fromJson -}}
{{- if and $labels (gt (int $gpus) (int $pool.all)) -}}
{{- fail (printf "workerGroups: on pods with %s the models take %d GPUs, and those have %d; raise maxReplicas or gpu.count of one, or write fewer replicas of a model" $labels (int $gpus) (int $pool.all)) -}}
{{- end -}}
{{- end -}}
{{- $all := (include "specdec.gpuPool" (dict "root" . "labels" "") | fromJson).all -}}
{{- if gt (int $needed) (int $all) -}}
{{- fail (printf "workerGroups: the models take %d GPUs, drafts included, and all groups together have %d; raise maxReplicas or gpu.count of one, or write fewer replicas of a model" (int $needed) (int $all)) -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateStorage" -}}
{{- range $name := list "models" "cache" "state" -}}
{{- with get $.Values.storage $name -}}
{{- if and .existingClaim (ne .type "claim") -}}
{{- fail (printf "storage.%s.existingClaim: an emptyDir has no claim; write type: claim, or leave it empty" $name) -}}
{{- end -}}
{{- if and .readOnly (eq .type "emptyDir") (or (ne $name "models") (not $.Values.modelImages)) -}}
{{- fail (printf "storage.%s.readOnly: an emptyDir begins empty, and would stay so; write type: claim, or false" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "specdec.validateClaimOfOneNode" . -}}
{{- if and .Values.modelImages .Values.storage.models.existingClaim .Values.storage.models.readOnly -}}
{{- fail "storage.models.readOnly: modelImages are copied there; write false, or leave modelImages out" -}}
{{- end -}}
{{- if hasPrefix (printf "%s/" .Values.storage.models.mountPath) (printf "%s/" .Values.storage.cache.mountPath) -}}
{{- fail "storage.cache.mountPath: it is, or is above, storage.models.mountPath; write another path, such as /cache" -}}
{{- end -}}
{{- if and .Values.hub.offline (eq .Values.storage.models.type "emptyDir") -}}
{{- range $index, $model := (include "specdec.models" . | fromJson).models -}}
{{- $at := printf "models[%d]" $index -}}
{{- include "specdec.validateOffline" (dict "root" $ "at" (printf "%s.model" $at) "model" $model.model) -}}
{{- if kindIs "map" $model.speculativeConfig -}}
{{- with $model.speculativeConfig.model -}}
{{- include "specdec.validateOffline" (dict "root" $ "at" (printf "%s.speculativeConfig.model" $at) "model" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateOffline" -}}
{{- if not (hasPrefix "/" .model) -}}
{{- fail (printf "%s: %q has to be fetched, which hub.offline forbids; write its path below %s, and set modelImages or storage.models" .at .model .root.Values.storage.models.mountPath) -}}
{{- end -}}
{{- end -}}

{{/* Pods that share it are placed on one node, so what would need another is refused. */}}
{{- define "specdec.validateClaimOfOneNode" -}}
{{- $pods := ternary 1 0 .Values.head.schedulable -}}
{{- range $name, $group := include "specdec.groups" . | fromJson -}}
{{- $pods = add $pods (int $group.maxReplicas) -}}
{{- end -}}
{{- range $name := list "models" "cache" -}}
{{- with get $.Values.storage $name -}}
{{- if and (eq .type "claim") (eq (toJson .accessModes) (toJson (list "ReadWriteOncePod"))) (gt (int $pods) 1) -}}
{{- fail (printf "storage.%s.accessModes: %d pods mount it, and ReadWriteOncePod is for one; write ReadWriteOnce if one node has room for them, or ReadWriteMany" $name (int $pods)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $claim := include "specdec.claimOfOneNode" . -}}
{{- if and $claim .Values.keda.enabled -}}
{{- fail (printf "keda.enabled: a warm node is of no use, since workers have to be where the claim of storage.%s is; write ReadWriteMany for its accessModes, or false" $claim) -}}
{{- end -}}
{{- $products := list -}}
{{- range $name, $group := include "specdec.groups" . | fromJson -}}
{{- if and (gt (int $group.gpu.count) 0) $group.gpu.product -}}
{{- $products = append $products $group.gpu.product | uniq -}}
{{- end -}}
{{- end -}}
{{- if and $claim (gt (len $products) 1) -}}
{{- fail (printf "storage.%s.accessModes: a claim for one node, and no node has GPUs of the kinds %s at once; write ReadWriteMany" (splitList " " $claim | first) (join " and " $products)) -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateWaysIn" -}}
{{- $values := .Values -}}
{{- with $values.ingress -}}
{{- if and .enabled (not .host) -}}
{{- fail "ingress.host: an Ingress without one would take every host's requests; write the service's name" -}}
{{- end -}}
{{- if and .enabled (eq .host .grpcHost) -}}
{{- fail "ingress.grpcHost: it is host, and a controller speaks gRPC or HTTP for a name; write another, or leave it empty" -}}
{{- end -}}
{{- end -}}
{{- with $values.gatewayApi -}}
{{- if and .enabled (not .parentRefs) (not .gateway.create) -}}
{{- fail "gatewayApi.parentRefs: routes need a Gateway; name one, or set gatewayApi.gateway.create" -}}
{{- end -}}
{{- if and .enabled .gateway.create (not .gateway.className) -}}
{{- fail "gatewayApi.gateway.className: a Gateway needs one; `kubectl get gatewayclass` lists them" -}}
{{- end -}}
{{- range .grpcHostnames -}}
{{- if has . $values.gatewayApi.hostnames -}}
{{- fail (printf "gatewayApi.grpcHostnames: %s is in hostnames too, where the HTTPRoute would take its requests; write another name" .) -}}
{{- end -}}
{{- end -}}
{{- if and .enabled (not .grpcHostnames) -}}
{{- fail "gatewayApi.grpcHostnames: gRPC needs a name of its own beside HTTP's; write one" -}}
{{- end -}}
{{- end -}}
{{- with $values.tls -}}
{{- if and (eq .mode "sidecar") (or $values.ingress.enabled $values.gatewayApi.enabled) -}}
{{- fail "tls.mode: with ingress or gatewayApi TLS ends there; write gateway" -}}
{{- end -}}
{{- if and (eq .mode "gateway") (not $values.ingress.enabled) (not $values.gatewayApi.gateway.create) -}}
{{- fail "tls.mode: nothing of this release would speak TLS; enable ingress or gatewayApi.gateway.create, or write sidecar or none" -}}
{{- end -}}
{{- if and (ne .mode "none") (not .secretName) (not .certManager.enabled) -}}
{{- fail "tls.secretName: TLS needs a certificate; name a Secret of type kubernetes.io/tls, or set tls.certManager.enabled" -}}
{{- end -}}
{{- if and .certManager.enabled (eq .mode "none") -}}
{{- fail "tls.certManager.enabled: no one would use the certificate; write tls.mode: gateway or sidecar" -}}
{{- end -}}
{{- if and .certManager.enabled (not .certManager.issuerName) -}}
{{- fail "tls.certManager.issuerName: a certificate needs an issuer; `kubectl get issuer,clusterissuer` lists them" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateNetwork" -}}
{{- with .Values.networkPolicy -}}
{{- if and .enabled $.Values.hub.offline $.Values.ray.autoscaler.enabled (hasSuffix "/0" .apiServerCidr) -}}
{{- fail (printf "networkPolicy.apiServerCidr: %s is everywhere, which hub.offline forbids; write the address of Kubernetes' API (`kubectl get endpoints kubernetes`), such as 10.0.0.1/32" .apiServerCidr) -}}
{{- end -}}
{{- range $index, $peer := .operator -}}
{{- if and $.Values.networkPolicy.enabled (eq $.Values.ray.authMode "disabled") (hasKey $peer "namespaceSelector") (not $peer.namespaceSelector) -}}
{{- fail (printf "networkPolicy.operator[%d].namespaceSelector: with ray.authMode disabled, pods of any namespace that are labelled so could run code by Ray; write {matchLabels: {kubernetes.io/metadata.name: NAMESPACE}} of KubeRay's operator, or ray.authMode: token" $index) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateOperation" -}}
{{- if lt (int .Values.upgrade.oldClusterSeconds) (int .Values.drainSeconds) -}}
{{- fail (printf "upgrade.oldClusterSeconds: running requests may take drainSeconds (%d); write at least that" (int .Values.drainSeconds)) -}}
{{- end -}}
{{- with .Values.keda -}}
{{- if .enabled -}}
{{- if not .prometheusUrl -}}
{{- fail "keda.prometheusUrl: KEDA has to ask somebody; write Prometheus' address, such as http://prometheus-operated.monitoring:9090" -}}
{{- end -}}
{{- if not .priorityClassName -}}
{{- fail "keda.priorityClassName: placeholders have to give way to workers; name a PriorityClass with a negative value" -}}
{{- end -}}
{{- if not (hasKey (include "specdec.groups" $ | fromJson) .group) -}}
{{- fail (printf "keda.group: no enabled worker group is called %q; write one of workerGroups" .group) -}}
{{- end -}}
{{- if not (include "specdec.kedaModels" $ | fromJson).names -}}
{{- fail (printf "keda.group: no model runs on %s, as %q would; write the group that they run on" (ternary "GPUs" "CPUs" (gt (int (get (include "specdec.groups" $ | fromJson) .group).gpu.count) 0)) .group) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
