{{/* The containers of a Ray pod. */}}

{{- define "specdec.rayContainer" -}}
{{- $values := .root.Values -}}
name: ray-{{ .kind }}
image: {{ include "specdec.image" .root }}
imagePullPolicy: {{ $values.image.pullPolicy }}
securityContext:
  {{- toYaml $values.security.containerSecurityContext | nindent 2 }}
env:
  {{- include "specdec.env" . | nindent 2 }}
ports:
  {{- if eq .kind "head" }}
  - {name: gcs-server, containerPort: 6379}
  - {name: dashboard, containerPort: 8265}
  {{- end }}
  {{- if include "specdec.takesRequests" . }}
  # KubeRay makes ports of the Service of those whose names begin so. Pods without them are no part.
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
  {{- include "specdec.volumeMounts" . | nindent 2 }}
{{- end -}}

{{/* GPUs are limits, which Ray counts. */}}
{{- define "specdec.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- with .gpu -}}
{{- if gt (int .count) 0 -}}
{{- $_ := set $resources.limits .resource (int .count) -}}
{{- $_ := set $resources.requests .resource (int .count) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "specdec.env" -}}
{{- $values := .root.Values -}}
{{- $storage := $values.storage -}}
- {name: HOME, value: /tmp}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
# Several reports fall into the time that the autoscaler of replicas looks back on.
- {name: RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S, value: "2.0"}
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
{{- with $values.extraEnv }}
{{ toYaml . }}
{{- end }}
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
{{- if $values.auth.apiKeys.enabled }}
- {name: api-keys, mountPath: /etc/specdec/api-keys, readOnly: true}
{{- end }}
{{- if $values.auth.adminToken.enabled }}
- {name: admin-token, mountPath: /etc/specdec/admin-token, readOnly: true}
{{- end }}
{{- with $values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
KubeRay's own probes want wget. A worker takes requests while Serve's proxy answers there, which it
does where a replica is; a draft worker, and the head, are ready once Ray is: KubeRay looks at the
head's proxy itself.
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
How long the hook of a pod may take. Serve stops a replica that found no other place by its own wait
(drainSeconds + 10) before the deadline that it is told, so 20 s remain of what is added here.
*/}}
{{- define "specdec.hookSeconds" -}}
{{- $values := .root.Values -}}
{{- add $values.drainSeconds 30 (ternary $values.migrationSeconds 0 (eq .kind "worker")) -}}
{{- end -}}

{{/*
A worker: Ray is told that the node goes, so Serve makes replicas elsewhere and then lets those here
end; until none is left, or the time is over. Serve ends its proxy here half a minute after it is
told, whatever the replicas do, so processes are looked at too; by their titles, which Ray sets.
*/}}
{{- define "specdec.preStop.worker" -}}
ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "the pod stops" --deadline-remaining-seconds {{ include "specdec.hookSeconds" . }} --address "$RAY_ADDRESS" --node-id "$(python -c 'import ray; ray.init(address="auto", log_to_driver=False); print(ray.get_runtime_context().get_node_id())' | tail -n 1)"; while [ $SECONDS -lt {{ include "specdec.hookSeconds" . }} ]; do {{ include "specdec.proxyAnswers" . }} || grep -aqs "[r]ay::ServeReplica:" /proc/[0-9]*/cmdline || break; sleep 1; done
{{- end -}}

{{/*
The head: the cluster ends with it. First the applications go, which lets their replicas drain; a
shutdown of Serve alone would end the proxy, and with it every stream, at once.
*/}}
{{- define "specdec.preStop.head" -}}
export RAY_DASHBOARD_ADDRESS=http://127.0.0.1:8265; none=$(mktemp); echo "applications: []" > "$none"; serve deploy "$none"; while [ $SECONDS -lt {{ include "specdec.hookSeconds" . }} ]; do serve status | grep -q "^applications: {}" && break; sleep 1; done; serve shutdown --yes; {{ include "specdec.awaitClosed" . }}
{{- end -}}

{{- define "specdec.awaitClosed" -}}
while [ $SECONDS -lt {{ include "specdec.hookSeconds" . }} ]; do {{ include "specdec.proxyAnswers" . }} || break; sleep 1; done
{{- end -}}

{{- define "specdec.proxyAnswers" -}}
(exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null
{{- end -}}

{{/* Envoy: TLS from outside, plain text to Serve's proxy in the same pod. */}}
{{- define "specdec.sidecar" -}}
{{- $values := .root.Values -}}
{{- with $values.tls.sidecar -}}
name: tls
image: {{ .image }}
imagePullPolicy: {{ $values.image.pullPolicy }}
args: ["--config-path", "/etc/envoy/envoy.yaml", "--disable-hot-restart", "--log-level", "warning"]
securityContext:
  {{- toYaml $values.security.containerSecurityContext | nindent 2 }}
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
# Until Serve's proxy beside it is done.
lifecycle:
  preStop:
    exec:
      command: ["bash", "-c", {{ include "specdec.awaitClosed" $ | toJson }}]
volumeMounts:
  - {name: envoy, mountPath: /etc/envoy, readOnly: true}
  - {name: tls, mountPath: /etc/specdec/tls, readOnly: true}
{{- end -}}
{{- end -}}
