{{/* GPUs that models need, and GPUs of the pods on which they may run. */}}

{{/*
The targets and drafts that need GPUs, as {"parts": [...]}, each with: at (the value that sets the
number of ranks), kind (target or draft), model (index in .Values.models), labels (of the Ray nodes
on which it may run, empty for any), ranks (GPUs), spans (whether these may be in several pods),
replicas: for drafts that replicas share, the number of workers. A draft that shares the target's GPU
is not among them.
*/}}
{{- define "specdec.gpuParts" -}}
{{- $parts := list -}}
{{- range $index, $model := (include "specdec.models" . | fromJson).models -}}
{{- if eq $model.device "cuda" -}}
{{- $placement := merge (dict) $model.settings (include "specdec.placement" (dict "root" $ "model" $model) | fromJson) -}}
{{- $replicas := ternary $model.autoscaling.minReplicas $model.replicas $model.autoscaling.enabled | int -}}
{{- $part := dict "model" $index "replicas" $replicas -}}
{{- $parts = append $parts (merge (dict "kind" "target" "at" (printf "models[%d].tensorParallelSize" $index) "labels" (default "" $placement.target_labels) "ranks" (int $model.tensorParallelSize) "spans" (has (default "" $placement.target_placement) (list "pack" "spread"))) $part) -}}
{{- $ranks := include "specdec.draftRanks" $model | int -}}
{{- $shares := and (kindIs "map" $model.speculativeConfig) (get (default dict $model.speculativeConfig) "share_gpu") -}}
{{- if and (gt $ranks 0) (not $shares) -}}
{{- $perWorker := int $model.draft.replicasPerWorker -}}
{{- if gt $perWorker 1 -}}
{{- $most := include "specdec.mostReplicas" $model | int -}}
{{- $part = dict "model" $index "replicas" (div (add $most $perWorker -1) $perWorker) -}}
{{- end -}}
{{- if gt (int $model.draft.maxWorkers) 0 -}}
{{- $part = dict "model" $index "replicas" (int $model.draft.minWorkers) -}}
{{- end -}}
{{- $parts = append $parts (merge (dict "kind" "draft" "at" (printf "models[%d].speculativeConfig.draft_tensor_parallel_size" $index) "labels" (default "" $placement.draft_labels) "ranks" $ranks "spans" false) $part) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson (dict "parts" $parts) -}}
{{- end -}}

{{/*
The groups that match the labels of a part: names, largest (most GPUs in one pod), all (GPUs of all
pods at maxReplicas). Takes root and labels. Labels that the chart does not set match every group.
*/}}
{{- define "specdec.gpuPool" -}}
{{- $labels := .labels -}}
{{- $ours := regexMatch "^specdec-(role|group)=[a-z0-9-]+$" $labels -}}
{{- $names := list -}}
{{- $largest := 0 -}}
{{- $all := 0 -}}
{{- range $name, $group := include "specdec.groups" .root | fromJson -}}
{{- $own := list (printf "specdec-role=%s" $group.role) (printf "specdec-group=%s" $name) -}}
{{- if or (not $ours) (has $labels $own) -}}
{{- $names = append $names $name -}}
{{- $largest = max $largest (int $group.gpu.count) -}}
{{- $all = add $all (mul (int $group.gpu.count) (int $group.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- toJson (dict "names" $names "largest" $largest "all" $all) -}}
{{- end -}}

{{/*
The number of pods of a group that are certain to have a replica, and therefore Serve's proxy, and
therefore to be ready. Takes root and name. Ray packs replicas onto few pods, so this follows from
GPUs only: the pods needed for the shards that remain if all other matching pods are full. Draft pods
are in no Service, and always ready.
*/}}
{{- define "specdec.readyPods" -}}
{{- $root := .root -}}
{{- $name := .name -}}
{{- $group := get (include "specdec.groups" $root | fromJson) $name -}}
{{- $pods := ternary $group.minReplicas $group.replicas $root.Values.ray.autoscaler.enabled | int -}}
{{- $ready := 0 -}}
{{- if eq $group.role "draft" -}}
{{- $ready = $pods -}}
{{- else if gt (int $group.gpu.count) 0 -}}
{{- $wanted := include "specdec.gpusWanted" (dict "root" $root "kind" "target") | fromJson -}}
{{- range $labels, $gpus := $wanted -}}
{{- $pool := include "specdec.gpuPool" (dict "root" $root "labels" $labels) | fromJson -}}
{{- if has $name $pool.names -}}
{{- $elsewhere := sub (int $pool.all) (mul (int $group.gpu.count) (int $group.maxReplicas)) -}}
{{- $left := max 0 (sub (int $gpus) $elsewhere) -}}
{{- $ready = max $ready (min $pods (div (add $left (int $group.gpu.count) -1) (int $group.gpu.count))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $ready -}}
{{- end -}}

{{/*
GPUs that parts need, by their labels. Takes root, and kind, or "" for both. Of targets alone, those
that spread over pods count as one GPU: other pods may have ranks but no Router.
*/}}
{{- define "specdec.gpusWanted" -}}
{{- $kind := .kind -}}
{{- $wanted := dict -}}
{{- range (include "specdec.gpuParts" .root | fromJson).parts -}}
{{- if or (not $kind) (eq .kind $kind) -}}
{{- $gpus := ternary 1 (mul (int .ranks) (int .replicas)) (and .spans (eq $.kind "target")) -}}
{{- $_ := set $wanted .labels (add (int (default 0 (get $wanted .labels))) $gpus) -}}
{{- end -}}
{{- end -}}
{{- toJson $wanted -}}
{{- end -}}
