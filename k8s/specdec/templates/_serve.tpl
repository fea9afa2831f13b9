{{/* serveConfigV2: one application of Ray Serve for each model. */}}

{{- define "specdec.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: {{ include "specdec.anyHost" . | quote }}
  port: 8000
grpc_options:
  port: 9000
  grpc_servicer_functions:
{{- $serve := .Files.Get "files/serve.yaml" | fromYaml }}
{{- range $serve.grpc_servicer_functions }}
    - {{ . }}
{{- end }}
applications:
{{- range (include "specdec.models" . | fromJson).models }}
  - name: {{ .application | quote }}
    route_prefix: {{ .routePrefix | quote }}
    import_path: cluster.app:build
    args:
{{- /* As JSON, since toYaml may write large numbers as 1e+06. */}}
{{- range $key, $value := include "specdec.applicationArgs" (dict "root" $ "model" .) | fromJson }}
      {{ $key }}: {{ toJson $value }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The settings of one model, by their keys in the file of `specdec serve --config`. */}}
{{- define "specdec.applicationArgs" -}}
{{- $values := .root.Values -}}
{{- $args := dict
  "model" .model.model
  "served_model_name" .model.name
  "tensor_parallel_size" .model.tensorParallelSize
  "device" .model.device
  "drain_timeout_s" $values.drainSeconds
  "state_dir" "/var/lib/specdec"
-}}
{{- if ne (toString .model.speculativeConfig) "auto" -}}
{{- $_ := set $args "speculative_config" .model.speculativeConfig -}}
{{- end -}}
{{- if gt (int .model.draft.replicasPerWorker) 1 -}}
{{- $_ := set $args "replicas_per_draft_worker" .model.draft.replicasPerWorker -}}
{{- end -}}
{{- if gt (int .model.draft.maxWorkers) 0 -}}
{{- $_ := set $args "min_draft_workers" .model.draft.minWorkers -}}
{{- $_ := set $args "max_draft_workers" .model.draft.maxWorkers -}}
{{- $_ := set $args "target_draft_utilization" .model.draft.targetUtilization -}}
{{- end -}}
{{- with .model.autoscaling -}}
{{- if .enabled -}}
{{- $_ := set $args "min_replicas" .minReplicas -}}
{{- $_ := set $args "max_replicas" .maxReplicas -}}
{{- $_ := set $args "target_requests_per_replica" .targetRequestsPerReplica -}}
{{- $_ := set $args "upscale_delay_s" .upscaleDelaySeconds -}}
{{- $_ := set $args "downscale_delay_s" .downscaleDelaySeconds -}}
{{- else -}}
{{- $_ := set $args "num_replicas" $.model.replicas -}}
{{- end -}}
{{- end -}}
{{- if $values.auth.apiKeys.enabled -}}
{{- $_ := set $args "api_key_file" (printf "/etc/specdec/api-keys/%s" $values.auth.apiKeys.key) -}}
{{- end -}}
{{- if $values.auth.adminToken.enabled -}}
{{- $_ := set $args "admin_token_file" (printf "/etc/specdec/admin-token/%s" $values.auth.adminToken.key) -}}
{{- end -}}
{{- with include "specdec.allowedHosts" .root -}}
{{- $_ := set $args "allowed_hosts" . -}}
{{- end -}}
{{- merge $args .model.settings (include "specdec.placement" . | fromJson) | toJson -}}
{{- end -}}

{{/*
Host names that requests may be addressed to: those of the Service, the Ingress and the Gateway, and
auth.allowedHosts. Empty where API keys make the check needless. Probes, KubeRay and Prometheus use
IP addresses, which are always allowed. A Gateway without hostnames accepts every name.
*/}}
{{- define "specdec.allowedHosts" -}}
{{- $values := .Values -}}
{{- if or $values.auth.allowedHosts (not $values.auth.apiKeys.enabled) -}}
{{- $service := include "specdec.serveService" . -}}
{{- $inNamespace := printf "%s.%s" $service .Release.Namespace -}}
{{- $hosts := list $service $inNamespace (printf "%s.svc" $inNamespace) (printf "%s.svc.cluster.local" $inNamespace) -}}
{{- if $values.ingress.enabled -}}
{{- $hosts = append $hosts $values.ingress.host -}}
{{- end -}}
{{- if $values.gatewayApi.enabled -}}
{{- $hosts = concat $hosts (default (list "*") $values.gatewayApi.hostnames) -}}
{{- end -}}
{{- if $values.tls.certManager.enabled -}}
{{- $hosts = concat $hosts $values.tls.certManager.dnsNames -}}
{{- end -}}
{{- join "," (concat $hosts $values.auth.allowedHosts | uniq) -}}
{{- end -}}
{{- end -}}

{{/*
Node labels that place a model's target and draft on groups of that role, if there are such groups
with the model's kind of device. Thus no draft takes a GPU that the shards of another replica need,
and Routers run on pods that receive requests.
*/}}
{{- define "specdec.placement" -}}
{{- $roles := list -}}
{{- range $name, $group := include "specdec.groups" .root | fromJson -}}
{{- if eq (eq $.model.device "cuda") (gt (int $group.gpu.count) 0) -}}
{{- $roles = append $roles $group.role -}}
{{- end -}}
{{- end -}}
{{- $placement := dict -}}
{{- if has "target" $roles -}}
{{- $_ := set $placement "target_labels" "specdec-role=target" -}}
{{- end -}}
{{- if and (has "draft" $roles) (gt (include "specdec.draftRanks" .model | int) 0) -}}
{{- $_ := set $placement "draft_labels" "specdec-role=draft" -}}
{{- end -}}
{{- toJson $placement -}}
{{- end -}}
