{{/* The containers of a Ray pod. */}}

{{- define "specdec.rayContainer" -}}
{{- $values := .root.Values -}}
name: ray-{{ .kind }}
{{ include "specdec.imageAndSecurity" (list .root (include "specdec.image" .root)) }}
env:
  {{- include "specdec.replaced" (dict "own" (include "specdec.env" .) "values" $values "extra" "extraEnv" "key" "name") | nindent 2 }}
ports:
  {{- if eq .kind "head" }}
  - {name: gcs-server, containerPort: 6379}
  - {name: dashboard, containerPort: 8265}
  {{- end }}
  {{- if include "specdec.takesRequests" . }}
  # KubeRay adds ports whose names begin with serve to its Service; pods without them are no endpoints.
  - {name: serve, containerPort: 8000}
  - {name: serve-grpc, containerPort: 9000}
  {{- end }}
  - {name: metrics, containerPort: 8080}
resources:
  {{- include "specdec.resources" .group | nindent 2 }}
{{- include "specdec.probes" . }}
lifecycle:
  preStop:
    exec:
      command: ["bash", "-c", {{ include (printf "specdec.preStop.%s" .kind) . | toJson }}]
volumeMounts:
  {{- include "specdec.replaced" (dict "own" (include "specdec.volumeMounts" .) "values" $values "extra" "extraVolumeMounts" "key" "mountPath") | nindent 2 }}
{{- end -}}

{{/* Takes root and the image of a container. */}}
{{- define "specdec.imageAndSecurity" -}}
{{- $values := (index . 0).Values -}}
image: {{ index . 1 | quote }}
imagePullPolicy: {{ $values.image.pullPolicy }}
securityContext:
  {{- toYaml $values.security.containerSecurityContext | nindent 2 }}
{{- end -}}

{{/* GPUs are set as limits, by which Ray counts them. */}}
{{- define "specdec.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- with .gpu -}}
{{- if gt (int .count) 0 -}}
{{- range $side := list "limits" "requests" -}}
{{- $_ := set $resources $side (set (default dict (get $resources $side)) $.gpu.resource (int $.gpu.count)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "specdec.env" -}}
{{- $values := .root.Values -}}
{{- $storage := $values.storage -}}
- {name: HOME, value: /tmp}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
# Replicas report several times within the look-back period of Serve's autoscaler.
- {name: RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S, value: "2.0"}
{{- with include "specdec.maxBodyMib" .root }}
# For Serve's proxies; the images make them apply it.
- {name: SPECDEC_HTTP_MAX_BODY_MIB, value: {{ . | quote }}}
{{- end }}
{{- if include "specdec.runsModels" . }}
- {name: SPECDEC_CACHE_DIR, value: {{ $storage.cache.mountPath }}/specdec}
- {name: TRITON_CACHE_DIR, value: {{ $storage.cache.mountPath }}/triton}
- {name: TORCHINDUCTOR_CACHE_DIR, value: {{ $storage.cache.mountPath }}/inductor}
- {name: HF_HOME, value: {{ $storage.models.mountPath }}/hub}
{{- with $values.hub }}
{{- if .offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- with .endpoint }}
- {name: HF_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- if .token.name }}
- {name: HF_TOKEN_PATH, value: /etc/specdec/hub/token}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The largest http_max_body_mib of the models; empty if none sets it. */}}
{{- define "specdec.maxBodyMib" -}}
{{- $largest := 0 -}}
{{- $is_set := false -}}
{{- range (include "specdec.models" . | fromJson).models -}}
{{- $is_set = or $is_set (hasKey .settings "http_max_body_mib") -}}
{{- $largest = max $largest (int (default 16 .settings.http_max_body_mib)) -}}
{{- end -}}
{{- if $is_set }}{{ $largest }}{{ end -}}
{{- end -}}

{{- define "specdec.volumeMounts" -}}
{{- $values := .root.Values -}}
- {name: scratch, mountPath: /tmp}
- {name: ray-logs, mountPath: /tmp/ray}
{{- if include "specdec.runsModels" . }}
- {name: models, mountPath: {{ $values.storage.models.mountPath }}, readOnly: {{ $values.storage.models.readOnly }}}
- {name: cache, mountPath: {{ $values.storage.cache.mountPath }}, readOnly: {{ $values.storage.cache.readOnly }}}
{{- if $values.hub.token.name }}
- {name: hub-token, mountPath: /etc/specdec/hub, readOnly: true}
{{- end }}
{{- end }}
{{- if eq .kind "head" }}
- {name: state, mountPath: /var/lib/specdec}
{{- end }}
{{ include "specdec.authMounts" .root }}
{{- end -}}

{{/* Where containers find the API keys and the admin token, if they are enabled. */}}
{{- define "specdec.authMounts" -}}
{{- if .Values.auth.apiKeys.enabled }}
- {name: api-keys, mountPath: /etc/specdec/api-keys, readOnly: true}
{{- end }}
{{- if .Values.auth.adminToken.enabled }}
- {name: admin-token, mountPath: /etc/specdec/admin-token, readOnly: true}
{{- end }}
{{- end -}}

{{/*
Replace KubeRay's default probes, which need wget. A worker is ready while Serve's proxy on it
responds, which is the case if it has a replica. A draft worker and the head are ready when Ray is:
KubeRay itself probes the proxy of the head.
*/}}
{{- define "specdec.probes" }}
livenessProbe:
  httpGet: {path: /api/healthz, port: 52365}
  initialDelaySeconds: 30
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
readinessProbe:
  {{- if and (eq .kind "worker") (include "specdec.takesRequests" .) }}
  httpGet: {path: /-/healthz, port: serve}
  {{- else }}
  httpGet: {path: /api/healthz, port: 52365}
  {{- end }}
  initialDelaySeconds: 10
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

{{/*
Maximum duration of a pod's preStop hook, which is also the deadline passed to `ray drain-node`.
Serve stops a replica that has no replacement when its graceful shutdown timeout (drainSeconds + 10)
remains until that deadline; so 20 s of the 30 s added here remain for migration.
*/}}
{{- define "specdec.hookSeconds" -}}
{{- $values := .root.Values -}}
{{- add $values.drainSeconds 30 (ternary $values.migrationSeconds 0 (eq .kind "worker")) -}}
{{- end -}}

{{/*
Worker: drain the Ray node, so that Serve starts replicas on other nodes and then stops those here;
wait until none is left, or the time is over. Serve stops its proxy on a draining node after half a
minute, with or without replicas, so the hook also looks for replica processes, by the titles that
Ray sets.
*/}}
{{- define "specdec.preStop.worker" -}}
ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "the pod stops" --deadline-remaining-seconds {{ include "specdec.hookSeconds" . }} --address "$RAY_ADDRESS" --node-id "$(python -c 'import ray; ray.init(address="auto", log_to_driver=False); print(ray.get_runtime_context().get_node_id())' | tail -n 1)"; while [ $SECONDS -lt {{ include "specdec.hookSeconds" . }} ]; do {{ include "specdec.proxyAnswers" . }} || grep -aqs "[r]ay::ServeReplica:" /proc/[0-9]*/cmdline || break; sleep 1; done
{{- end -}}

{{/*
Head: the Ray cluster ends with it. Delete the applications first, which drains their replicas:
`serve shutdown` alone would stop the proxy, and every stream, immediately.
*/}}
{{- define "specdec.preStop.head" -}}
export RAY_DASHBOARD_ADDRESS=http://{{ ternary "[::1]" "127.0.0.1" (eq .root.Values.ipFamily "IPv6") }}:8265; none=$(mktemp); echo "applications: []" > "$none"; serve deploy "$none"; while [ $SECONDS -lt {{ include "specdec.hookSeconds" . }} ]; do serve status | grep -q "^applications: {}" && break; sleep 1; done; serve shutdown --yes; {{ include "specdec.awaitClosed" . }}
{{- end -}}

{{- define "specdec.awaitClosed" -}}
while [ $SECONDS -lt {{ include "specdec.hookSeconds" . }} ]; do {{ include "specdec.proxyAnswers" . }} || break; sleep 1; done
{{- end -}}

{{- define "specdec.proxyAnswers" -}}
(exec 3<>/dev/tcp/{{ include "specdec.ownHost" .root }}/8000) 2>/dev/null
{{- end -}}

{{/* Envoy: terminates TLS, and forwards plain text to Serve's proxy in the same pod. */}}
{{- define "specdec.sidecar" -}}
{{- with .root.Values.tls.sidecar -}}
name: tls
{{ include "specdec.imageAndSecurity" (list $.root .image) }}
args: ["--config-path", "/etc/envoy/envoy.yaml", "--disable-hot-restart", "--log-level", "warning"]
ports:
  - {name: tls-http, containerPort: 8443}
  - {name: tls-grpc, containerPort: 9443}
resources:
  {{- toYaml .resources | nindent 2 }}
livenessProbe:
  tcpSocket: {port: tls-http}
  periodSeconds: 10
readinessProbe:
  tcpSocket: {port: tls-http}
  periodSeconds: 5
# Keep running until Serve's proxy in this pod has stopped.
lifecycle:
  preStop:
    exec:
      command: ["bash", "-c", {{ include "specdec.awaitClosed" $ | toJson }}]
volumeMounts:
  - {name: envoy, mountPath: /etc/envoy, readOnly: true}
  - {name: tls, mountPath: /etc/specdec/tls, readOnly: true}
{{- end -}}
{{- end -}}
