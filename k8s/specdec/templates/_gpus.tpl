{{/* GPUs that models take, and those of the pods that they may be on. */}}

{{/*
The parts of the models that take GPUs, as {"parts": [...]}: at (the value that says how many), kind
(target or draft), model (its place in the list), labels (of the Ray nodes that it may be on, empty
for any), ranks (GPUs of one pod), replicas.
*/}}
{{- define "specdec.gpuParts" -}}
{{- $parts := list -}}
{{- range $index, $model := (include "specdec.models" . | fromJson).models -}}
{{- if eq $model.device "cuda" -}}
{{- $placement := merge (dict) $model.settings (include "specdec.placement" (dict "root" $ "model" $model) | fromJson) -}}
{{- $replicas := ternary $model.autoscaling.minReplicas $model.replicas $model.autoscaling.enabled | int -}}
{{- $part := dict "model" $index "replicas" $replicas -}}
{{- $parts = append $parts (merge (dict "kind" "target" "at" (printf "models[%d].tensorParallelSize" $index) "labels" (default "" $placement.target_labels) "ranks" (int $model.tensorParallelSize)) $part) -}}
{{- $ranks := include "specdec.draftRanks" $model | int -}}
{{- if gt $ranks 0 -}}
{{- $parts = append $parts (merge (dict "kind" "draft" "at" (printf "models[%d].speculativeConfig.draft_tensor_parallel_size" $index) "labels" (default "" $placement.draft_labels) "ranks" $ranks) $part) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson (dict "parts" $parts) -}}
{{- end -}}

{{/*
The groups on which labels let a part be: names, largest (GPUs of a pod), all (GPUs of all pods that
there may be). Takes root and labels. Labels that the chart does not set may be anybody's.
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
How many pods of a group are sure to have a replica, and so Serve's proxy, and so to be ready. Takes
root and name. Ray packs replicas, so only GPUs say: as many pods as shards are left for when all
other pods on which they may be are full. Drafts are behind no Service, and ready in any case.
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

{{/* GPUs that parts take, by their labels. Takes root, and kind, or "" for both. */}}
{{- define "specdec.gpusWanted" -}}
{{- $kind := .kind -}}
{{- $wanted := dict -}}
{{- range (include "specdec.gpuParts" .root | fromJson).parts -}}
{{- if or (not $kind) (eq .kind $kind) -}}
{{- $gpus := mul (int .ranks) (int .replicas) -}}
{{- $_ := set $wanted .labels (add (int (default 0 (get $wanted .labels))) $gpus) -}}
{{- end -}}
{{- end -}}
{{- toJson $wanted -}}
{{- end -}}
