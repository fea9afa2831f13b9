{{/*
Validations that the schema cannot express, since they involve several values. Every message names
the value, and ends with the fix.
*/}}

{{- define "specdec.validate" -}}
{{- include "specdec.validateNames" . -}}
{{- include "specdec.validateModels" . -}}
{{- include "specdec.validateGroups" . -}}
{{- include "specdec.validateResources" . -}}
{{- include "specdec.validateImage" . -}}
{{- include "specdec.validateGpus" . -}}
{{- include "specdec.validateStorage" . -}}
{{- include "specdec.validateWaysIn" . -}}
{{- include "specdec.validateNetwork" . -}}
{{- include "specdec.validateOperation" . -}}
{{- include "specdec.validatePicker" . -}}
{{- end -}}

{{- define "specdec.validateNames" -}}
{{- $fullname := include "specdec.fullname" . -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $fullname) -}}
{{- fail (printf "fullnameOverride: the RayService would have the name %q, and KubeRay requires lower case letters, digits and dashes, beginning with a letter; set such a name" $fullname) -}}
{{- end -}}
{{- $all := dict "head.podLabels" .Values.head.podLabels "commonLabels" .Values.commonLabels -}}
{{- range $name, $group := include "specdec.groups" . | fromJson -}}
{{- $_ := set $all (printf "workerGroups.%s.podLabels" $name) $group.podLabels -}}
{{- end -}}
{{- range $at, $labels := $all -}}
{{- $selecting := ternary "instance|component" "instance|component|part-of" (eq $at "commonLabels") -}}
{{- range $name := keys (default dict $labels) -}}
{{- if regexMatch (printf "^app[.]kubernetes[.]io/(%s)$" $selecting) $name -}}
{{- fail (printf "%s: selectors of the chart need its own value of %s; remove it" $at $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validatePicker" -}}
{{- with .Values.endpointPicker -}}
{{- if .enabled -}}
{{- $models := (include "specdec.models" $ | fromJson).models -}}
{{- if or (gt (len $models) 1) (gt (include "specdec.mostReplicas" (first $models) | int) 1) -}}
{{- fail "endpointPicker.enabled: Ray Serve's proxies choose among the replicas of a release, after the picker; give this release one model with one replica, and install a release for each further replica, with pods that endpointPicker.selector selects" -}}
{{- end -}}
{{- if eq $.Values.tls.mode "sidecar" -}}
{{- fail "endpointPicker.enabled: a gateway connects to the pods of an InferencePool without TLS; write tls.mode: gateway or none" -}}
{{- end -}}
{{- $groups := list -}}
{{- range $name, $group := include "specdec.groups" $ | fromJson -}}
{{- if ne $group.role "draft" -}}
{{- $groups = append $groups $name -}}
{{- end -}}
{{- end -}}
{{- if and (not .selector) (ne (len $groups) 1) -}}
{{- fail (printf "endpointPicker.selector: required with %d worker groups for targets; write labels that select the pods with replicas" (len $groups)) -}}
{{- end -}}
{{- with .scaledObject -}}
{{- if .enabled -}}
{{- if not (and .name $.Values.endpointPicker.slo) -}}
{{- fail "endpointPicker.scaledObject: needs name, of the workload with the pool's pods, and endpointPicker.slo, such as ttft:2000 tpot:40" -}}
{{- end -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "endpointPicker.scaledObject.minReplicas: %d must be at most maxReplicas (%d); lower it, or raise maxReplicas" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateModels" -}}
{{- $seen := dict -}}
{{- range $index, $model := (include "specdec.models" . | fromJson).models -}}
{{- $at := printf "models[%d]" $index -}}
{{- $application := $model.application -}}
{{- if hasKey $seen $application -}}
{{- fail (printf "%s.name: %q is already taken: another model has the same application name (%s); give each a different name" $at $model.name $application) -}}
{{- end -}}
{{- if hasKey $seen $model.routePrefix -}}
{{- fail (printf "%s.routePrefix: %q is already used by another model; write /%s, or leave it empty" $at $model.routePrefix $application) -}}
{{- end -}}
{{- $first := index (splitList "/" $model.routePrefix) 1 -}}
{{- if has $first ($.Files.Get "files/serve.yaml" | fromYaml).paths_of_the_service -}}
{{- fail (printf "%s.routePrefix: %q would hide an API path of the model at /; write another prefix, or give the model another name" $at $model.routePrefix) -}}
{{- end -}}
{{- $_ := set $seen $application true -}}
{{- $_ = set $seen $model.routePrefix true -}}
{{- with $model.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "%s.autoscaling.minReplicas: %d must be at most maxReplicas (%d); lower it, or raise maxReplicas" $at (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- $perWorker := int $model.draft.replicasPerWorker -}}
{{- if gt $perWorker 1 -}}
{{- if ne (include "specdec.draftRanks" $model | int) 1 -}}
{{- fail (printf "%s.draft.replicasPerWorker: %d needs a speculativeConfig with the method draft_model and one rank; change that, or write 1" $at $perWorker) -}}
{{- end -}}
{{- if gt $perWorker (include "specdec.mostReplicas" $model | int) -}}
{{- fail (printf "%s.draft.replicasPerWorker: %d is more than the number of replicas (%s); lower it, or add replicas" $at $perWorker (include "specdec.mostReplicas" $model)) -}}
{{- end -}}
{{- end -}}
{{- $maxWorkers := int $model.draft.maxWorkers -}}
{{- if gt $maxWorkers 0 -}}
{{- if ne (include "specdec.draftRanks" $model | int) 1 -}}
{{- fail (printf "%s.draft.maxWorkers: %d needs a speculativeConfig with the method draft_model and one rank; change that, or write 0" $at $maxWorkers) -}}
{{- end -}}
{{- if gt (int $model.draft.minWorkers) $maxWorkers -}}
{{- fail (printf "%s.draft.minWorkers: %d must be at most maxWorkers (%d); lower it, or raise maxWorkers" $at (int $model.draft.minWorkers) $maxWorkers) -}}
{{- end -}}
{{- if and (gt $maxWorkers (include "specdec.mostReplicas" $model | int)) (lt (int $model.draft.minWorkers) $maxWorkers) -}}
{{- fail (printf "%s.draft.maxWorkers: %d is more than the number of replicas (%s); lower it, or add replicas" $at $maxWorkers (include "specdec.mostReplicas" $model)) -}}
{{- end -}}
{{- if and (ne (toString $model.draft.targetUtilization) "0.7") (eq (int $model.draft.minWorkers) $maxWorkers) -}}
{{- fail (printf "%s.draft.targetUtilization: with minWorkers = maxWorkers (%d) the number of workers is fixed; leave it out, or raise maxWorkers" $at $maxWorkers) -}}
{{- end -}}
{{- if gt $perWorker 1 -}}
{{- fail (printf "%s.draft.maxWorkers: %d cannot be combined with replicasPerWorker; write 1 there" $at $maxWorkers) -}}
{{- end -}}
{{- end -}}
{{- $kernels := default "auto" $model.settings.kernels -}}
{{- $quantization := default "none" $model.settings.quantization -}}
{{- if and (eq $model.device "cuda") (eq $quantization "w8a8") -}}
{{- fail (printf "%s.settings.quantization: w8a8 runs on CPUs only; write int8 or int4, or set %s.device to cpu" $at $at) -}}
{{- end -}}
{{- if and (eq $model.device "cpu") (ne $kernels "triton") (eq $quantization "int4") -}}
{{- fail (printf "%s.settings.quantization: int4 runs on GPUs only; write int8 or w8a8, or run the model on a group with GPUs" $at) -}}
{{- end -}}
{{- if and (eq $model.device "cuda") (eq $kernels "torch") (has $quantization (list "int8" "int4")) -}}
{{- fail (printf "%s.settings.quantization: %s on GPUs needs Triton's kernels; remove %s.settings.kernels" $at $quantization $at) -}}
{{- end -}}
{{- if and (has $kernels (list "torch" "triton")) (eq $quantization "w8a8") -}}
{{- fail (printf "%s.settings.quantization: w8a8 needs the native kernels; write int8, or remove %s.settings.kernels" $at $at) -}}
{{- end -}}
{{- end -}}
{{- if not (hasKey $seen "/") -}}
{{- fail "models: no model has the routePrefix /, which serves /health and /metrics; leave it empty for the first" -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateGroups" -}}
{{- $groups := include "specdec.groups" . | fromJson -}}
{{- if and (not $groups) (not .Values.head.schedulable) -}}
{{- fail "head.schedulable: false, and no worker group is enabled, so no model can run; enable one below workerGroups, or write true" -}}
{{- end -}}
{{- range $name, $group := $groups -}}
{{- $at := printf "workerGroups.%s" $name -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]{0,20}[a-z0-9])?$" $name) -}}
{{- fail (printf "%s: a group's name must consist of at most 22 lower case letters, digits and dashes, and begin with a letter; write another name" $at) -}}
{{- end -}}
{{- if eq $name "head" -}}
{{- fail "workerGroups.head: the name is reserved for the head, whose values are below head; write another name" -}}
{{- end -}}
{{- if and (gt (int $group.gpu.count) 1) (contains "/mig-" $group.gpu.resource) -}}
{{- fail (printf "%s.gpu.count: a process can use only one %s; write 1, and raise replicas" $at $group.gpu.resource) -}}
{{- end -}}
{{- if gt (int $group.minReplicas) (int $group.maxReplicas) -}}
{{- fail (printf "%s.minReplicas: %d must be at most maxReplicas (%d); lower it, or raise maxReplicas" $at (int $group.minReplicas) (int $group.maxReplicas)) -}}
{{- end -}}
{{- if or (lt (int $group.replicas) (int $group.minReplicas)) (gt (int $group.replicas) (int $group.maxReplicas)) -}}
{{- fail (printf "%s.replicas: %d must be from minReplicas (%d) to maxReplicas (%d); raise maxReplicas, or change replicas" $at (int $group.replicas) (int $group.minReplicas) (int $group.maxReplicas)) -}}
{{- end -}}
{{- if and (not $.Values.ray.autoscaler.enabled) (ne (int $group.replicas) (int $group.maxReplicas)) -}}
{{- fail (printf "%s.maxReplicas: must equal replicas (%d), since ray.autoscaler is disabled; write %d, or enable ray.autoscaler" $at (int $group.replicas) (int $group.replicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateResources" -}}
{{- $values := .Values -}}
{{- $all := dict "head" $values.head.resources "ray.autoscaler" $values.ray.autoscaler.resources "tls.sidecar" $values.tls.sidecar.resources "endpointPicker" $values.endpointPicker.resources "tests" $values.tests.resources -}}
{{- range $name, $group := include "specdec.groups" . | fromJson -}}
{{- $_ := set $all (printf "workerGroups.%s" $name) $group.resources -}}
{{- end -}}
{{- range $at, $resources := $all -}}
{{- range $name, $request := $resources.requests -}}
{{- if hasKey (default dict $resources.limits) $name -}}
{{- $limit := get $resources.limits $name -}}
{{- if gt (include "specdec.quantity" $request | float64) (include "specdec.quantity" $limit | float64) -}}
{{- fail (printf "%s.resources.requests.%s: %v must be at most the limit (%v); lower it, or raise %s.resources.limits.%s" $at $name $request $limit $at $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateImage" -}}
{{- range $name, $group := include "specdec.groups" . | fromJson -}}
{{- if and (gt (int $group.gpu.count) 0) (not (hasPrefix "nvidia.com/" $group.gpu.resource)) (not $.Values.image.tag) (not $.Values.image.digest) -}}
{{- fail (printf "image.tag: the default image for GPUs contains CUDA, and workerGroups.%s uses %s; set the tag or digest of an image for it" $name $group.gpu.resource) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateGpus" -}}
{{- range (include "specdec.gpuParts" . | fromJson).parts -}}
{{- $pool := include "specdec.gpuPool" (dict "root" $ "labels" .labels) | fromJson -}}
{{- $pods := ternary (printf " with %s" .labels) "" (ne .labels "") -}}
{{- if and (eq (int $pool.largest) 0) (eq .labels "") -}}
{{- fail (printf "models[%d].device: no worker group has GPUs; set gpu.count below workerGroups, or write cpu" (int .model)) -}}
{{- end -}}
{{- if and (gt (int .ranks) (int $pool.largest)) (not .spans) -}}
{{- fail (printf "%s: %d ranks need as many GPUs in one pod, and the largest pod%s has %d GPUs; lower it, or raise a gpu.count below workerGroups, or for a target write pack in models[%d].settings.target_placement" .at (int .ranks) $pods (int $pool.largest) (int .model)) -}}
{{- end -}}
{{- end -}}
{{- $needed := 0 -}}
{{- range $labels, $gpus := include "specdec.gpusWanted" (dict "root" . "kind" "") | fromJson -}}
{{- $needed = add $needed (int $gpus) -}}
{{- $pool := include "specdec.gpuPool" (dict "root" $ "labels" $labels) | fromJson -}}
{{- if and $labels (gt (int $gpus) (int $pool.all)) -}}
{{- fail (printf "workerGroups: the models need %d GPUs on pods with %s, which have %d; raise maxReplicas or gpu.count of such a group, or lower the replicas of a model" (int $gpus) $labels (int $pool.all)) -}}
{{- end -}}
{{- end -}}
{{- $all := (include "specdec.gpuPool" (dict "root" . "labels" "") | fromJson).all -}}
{{- if gt (int $needed) (int $all) -}}
{{- fail (printf "workerGroups: the models need %d GPUs, drafts included, and all groups together have %d; raise maxReplicas or gpu.count of a group, or lower the replicas of a model" (int $needed) (int $all)) -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateStorage" -}}
{{- range $name := list "models" "cache" "state" -}}
{{- with get $.Values.storage $name -}}
{{- if and .existingClaim (ne .type "claim") -}}
{{- fail (printf "storage.%s.existingClaim: has no effect with type %s; write type: claim, or leave it empty" $name .type) -}}
{{- end -}}
{{- if ne (eq .type "volume") (not (empty .volume)) -}}
{{- fail (printf "storage.%s.volume: required with type volume, and with it alone; write a source, such as {hostPath: {path: /srv/%s}}, or another type" $name $name) -}}
{{- end -}}
{{- range $key := list "name" "persistentVolumeClaim" -}}
{{- if hasKey (default dict (get $.Values.storage $name).volume) $key -}}
{{- fail (printf "storage.%s.volume.%s: must be left out; the chart names the volume, and has type: claim with existingClaim for a claim" $name $key) -}}
{{- end -}}
{{- end -}}
{{- if and .readOnly (eq .type "emptyDir") (or (ne $name "models") (not $.Values.modelImages)) -}}
{{- fail (printf "storage.%s.readOnly: an emptyDir starts empty, and nothing could be written to it; write type: claim or volume, or false" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range .Values.extraVolumes -}}
{{- if hasKey (pick $.Values.storage "models" "cache" "state") (default "" .name) -}}
{{- fail (printf "extraVolumes: the chart's volume %s is that of storage.%s; set it there, or write another name" .name .name) -}}
{{- end -}}
{{- end -}}
{{- include "specdec.validateClaimOfOneNode" . -}}
{{- if and .Values.modelImages (or .Values.storage.models.existingClaim .Values.storage.models.volume) .Values.storage.models.readOnly -}}
{{- fail "storage.models.readOnly: modelImages are copied to this volume; write false, or remove modelImages" -}}
{{- end -}}
{{- if hasPrefix (printf "%s/" .Values.storage.models.mountPath) (printf "%s/" .Values.storage.cache.mountPath) -}}
{{- fail "storage.cache.mountPath: must not equal or contain storage.models.mountPath; write another path, such as /cache" -}}
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
{{- fail (printf "%s: %q would be downloaded, which hub.offline forbids; write its path below %s, and set modelImages or storage.models" .at .model .root.Values.storage.models.mountPath) -}}
{{- end -}}
{{- end -}}

{{/* Pods that share such a claim run on one node; values that need several nodes are rejected. */}}
{{- define "specdec.validateClaimOfOneNode" -}}
{{- $pods := ternary 1 0 .Values.head.schedulable -}}
{{- range $name, $group := include "specdec.groups" . | fromJson -}}
{{- $pods = add $pods (int $group.maxReplicas) -}}
{{- end -}}
{{- range $name := list "models" "cache" -}}
{{- with get $.Values.storage $name -}}
{{- if and (eq .type "claim") (eq (toJson .accessModes) (toJson (list "ReadWriteOncePod"))) (gt (int $pods) 1) -}}
{{- fail (printf "storage.%s.accessModes: %d pods mount it, and ReadWriteOncePod allows one; write ReadWriteOnce if they fit on one node, or ReadWriteMany" $name (int $pods)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $claim := include "specdec.claimOfOneNode" . -}}
{{- if and $claim .Values.keda.enabled -}}
{{- fail (printf "keda.enabled: workers cannot use an additional node, since only one node can mount the claim of storage.%s; write ReadWriteMany for its accessModes, or false" $claim) -}}
{{- end -}}
{{- $products := list -}}
{{- range $name, $group := include "specdec.groups" . | fromJson -}}
{{- if and (gt (int $group.gpu.count) 0) $group.gpu.product -}}
{{- $products = append $products $group.gpu.product | uniq -}}
{{- end -}}
{{- end -}}
{{- if and $claim (gt (len $products) 1) -}}
{{- fail (printf "storage.%s.accessModes: only one node can mount the claim, and the groups need nodes with different GPUs (%s); write ReadWriteMany" (splitList " " $claim | first) (join " and " $products)) -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateWaysIn" -}}
{{- $values := .Values -}}
{{- if eq (int $values.service.httpPort) (int $values.service.grpcPort) -}}
{{- fail (printf "service.grpcPort: must differ from httpPort (%d); change one of both" (int $values.service.httpPort)) -}}
{{- end -}}
{{- with $values.ingress -}}
{{- if and .enabled (not .host) -}}
{{- fail "ingress.host: required, since an Ingress without it receives the requests for every host; write the service's host name" -}}
{{- end -}}
{{- if and .enabled (eq .host .grpcHost) -}}
{{- fail "ingress.grpcHost: must differ from ingress.host, since a controller uses one backend protocol per host; write another name, or leave it empty" -}}
{{- end -}}
{{- end -}}
{{- with $values.gatewayApi -}}
{{- if and .enabled (not .parentRefs) (not .gateway.create) -}}
{{- fail "gatewayApi.parentRefs: routes need a Gateway; list one, or set gatewayApi.gateway.create" -}}
{{- end -}}
{{- if and .enabled .gateway.create (not .gateway.className) -}}
{{- fail "gatewayApi.gateway.className: required with gateway.create; `kubectl get gatewayclass` lists the classes" -}}
{{- end -}}
{{- range .grpcHostnames -}}
{{- if has . $values.gatewayApi.hostnames -}}
{{- fail (printf "gatewayApi.grpcHostnames: %s is in hostnames too, so the HTTPRoute would receive its requests; write another name" .) -}}
{{- end -}}
{{- end -}}
{{- if and .enabled (not .grpcHostnames) -}}
{{- fail "gatewayApi.grpcHostnames: required, since gRPC needs a host name that differs from HTTP's; add a name" -}}
{{- end -}}
{{- end -}}
{{- with $values.tls -}}
{{- if and (eq .mode "sidecar") (or $values.ingress.enabled $values.gatewayApi.enabled) -}}
{{- fail "tls.mode: sidecar cannot be combined with ingress or gatewayApi, where TLS ends; write gateway" -}}
{{- end -}}
{{- if and (eq .mode "gateway") (not $values.ingress.enabled) (not $values.gatewayApi.gateway.create) -}}
{{- fail "tls.mode: gateway needs an Ingress or Gateway of this release; enable ingress or gatewayApi.gateway.create, or write sidecar or none" -}}
{{- end -}}
{{- if and (ne .mode "none") (not .secretName) (not .certManager.enabled) -}}
{{- fail "tls.secretName: TLS needs a certificate; set a Secret of type kubernetes.io/tls, or set tls.certManager.enabled" -}}
{{- end -}}
{{- if and .certManager.enabled (eq .mode "none") -}}
{{- fail "tls.certManager.enabled: the certificate is not used with tls.mode none; write tls.mode: gateway or sidecar" -}}
{{- end -}}
{{- if and .certManager.enabled (not .certManager.issuerName) -}}
{{- fail "tls.certManager.issuerName: required with certManager.enabled; `kubectl get issuer,clusterissuer` lists the issuers" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateNetwork" -}}
{{- with .Values.ray.gcsFaultTolerance -}}
{{- if and .password.name (not .redisAddress) -}}
{{- fail "ray.gcsFaultTolerance.redisAddress: required with a password; write HOST:PORT of the Redis, or remove password.name" -}}
{{- end -}}
{{- if and .volume.size .redisAddress -}}
{{- fail "ray.gcsFaultTolerance.volume.size: the tables are in the Redis of redisAddress; remove one of both" -}}
{{- end -}}
{{- if and .volume.storageClassName (not .volume.size) -}}
{{- fail "ray.gcsFaultTolerance.volume.size: required with storageClassName; write a size, such as 1Gi" -}}
{{- end -}}
{{- if and .volume.size $.Values.ray.version (semverCompare "< 2.57.0" $.Values.ray.version) -}}
{{- fail (printf "ray.gcsFaultTolerance.volume.size: Ray %s (ray.version) cannot keep its tables there; use 2.57.0 or later, or a Redis" $.Values.ray.version) -}}
{{- end -}}
{{- if and .redisAddress $.Values.networkPolicy.enabled (not $.Values.networkPolicy.redis) -}}
{{- fail "networkPolicy.redis: no peer is allowed, so Ray could not reach ray.gcsFaultTolerance.redisAddress; write the peers, such as [{podSelector: {matchLabels: {app: redis}}}]" -}}
{{- end -}}
{{- end -}}
{{- with .Values.networkPolicy -}}
{{- if and .enabled $.Values.hub.offline (or $.Values.ray.autoscaler.enabled $.Values.endpointPicker.enabled) (hasSuffix "/0" (default "/0" .apiServerCidr)) -}}
{{- fail (printf "networkPolicy.apiServerCidr: %q allows all addresses, which hub.offline forbids; write the address of the Kubernetes API server (`kubectl get endpoints kubernetes`), such as 10.0.0.1/32" .apiServerCidr) -}}
{{- end -}}
{{- range $index, $peer := .operator -}}
{{- if and $.Values.networkPolicy.enabled (eq $.Values.ray.authMode "disabled") (hasKey $peer "namespaceSelector") (not $peer.namespaceSelector) -}}
{{- fail (printf "networkPolicy.operator[%d].namespaceSelector: with ray.authMode disabled, pods with these labels in any namespace could run code through Ray; write {matchLabels: {kubernetes.io/metadata.name: NAMESPACE}} with the namespace of KubeRay's operator, or ray.authMode: token" $index) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "specdec.validateOperation" -}}
{{- if lt (int .Values.upgrade.oldClusterSeconds) (int .Values.drainSeconds) -}}
{{- fail (printf "upgrade.oldClusterSeconds: must be at least drainSeconds (%d), in which running requests finish; raise it" (int .Values.drainSeconds)) -}}
{{- end -}}
{{- with .Values.keda -}}
{{- if .enabled -}}
{{- if not .prometheusUrl -}}
{{- fail "keda.prometheusUrl: required with keda.enabled; write the URL of Prometheus, such as http://prometheus-operated.monitoring:9090" -}}
{{- end -}}
{{- if not .priorityClassName -}}
{{- fail "keda.priorityClassName: required with keda.enabled, so that workers preempt placeholders; set a PriorityClass with a negative value" -}}
{{- end -}}
{{- if not (hasKey (include "specdec.groups" $ | fromJson) .group) -}}
{{- fail (printf "keda.group: no enabled worker group has the name %q; write one of workerGroups" .group) -}}
{{- end -}}
{{- if not (include "specdec.kedaModels" $ | fromJson).names -}}
{{- fail (printf "keda.group: no model runs on %s, which group %q has; write the group that the models run on" (ternary "GPUs" "CPUs" (gt (int (get (include "specdec.groups" $ | fromJson) .group).gpu.count) 0)) .group) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
