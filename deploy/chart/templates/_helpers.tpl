{{- define "kube-ipvs.name" -}}
{{- default "kube-ipvs" .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* The labels that select the pods. They cannot change once the DaemonSet exists. */}}
{{- define "kube-ipvs.selectorLabels" -}}
app.kubernetes.io/name: kube-ipvs
app.kubernetes.io/instance: {{ include "kube-ipvs.name" . }}
{{- end -}}

{{- define "kube-ipvs.labels" -}}
{{ include "kube-ipvs.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ include "kube-ipvs.strings" . }}
{{- end }}
{{- end -}}

{{/*
A map of labels or annotations, or of the nodes' labels: the API takes only strings, but
--set NAME=true and --set NAME=1 give a boolean and a number.
*/}}
{{- define "kube-ipvs.strings" -}}
{{- $out := dict -}}
{{- range $name, $value := . -}}
{{- $_ := set $out $name (ternary $value (toJson $value) (kindIs "string" $value)) -}}
{{- end -}}
{{- toYaml $out -}}
{{- end -}}

{{- define "kube-ipvs.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default $.Chart.AppVersion .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails with a clear message where a value is missing or cannot work. */}}
{{- define "kube-ipvs.validate" -}}
{{- $_ := required "apiServer is required: the URL of the API server, reachable without a Service, such as https://10.0.0.10:6443" .Values.apiServer -}}
{{- $mode := default "ClusterCIDR" (get .Values.proxy "detectLocalMode") -}}
{{- if and (eq $mode "ClusterCIDR") (not (get .Values.proxy "clusterCIDR")) -}}
{{- fail "proxy.clusterCIDR is required: the pod CIDR, such as 10.244.0.0/16. Without one, set proxy.detectLocalMode to NodeCIDR, BridgeInterface or InterfaceNamePrefix" -}}
{{- end -}}
{{- $detect := default dict (get .Values.proxy "detectLocal") -}}
{{- if and (eq $mode "BridgeInterface") (not (get $detect "bridgeInterface")) -}}
{{- fail "proxy.detectLocal.bridgeInterface is required with proxy.detectLocalMode BridgeInterface" -}}
{{- end -}}
{{- if and (eq $mode "InterfaceNamePrefix") (not (get $detect "interfaceNamePrefix")) -}}
{{- fail "proxy.detectLocal.interfaceNamePrefix is required with proxy.detectLocalMode InterfaceNamePrefix" -}}
{{- end -}}
{{- if and .Values.metrics.podMonitor.enabled (not .Values.containerPorts) -}}
{{- fail "metrics.podMonitor needs containerPorts: it finds the port of the metrics by name" -}}
{{- end -}}
{{- if and .Values.metrics.podMonitor.enabled (include "kube-ipvs.metricsOnLoopback" .) -}}
{{- fail (printf "metrics.podMonitor needs metrics that Prometheus can reach: proxy.metricsBindAddress is %q; set it to a CIDR that contains the nodes' internal addresses, such as 10.12.96.0/20, and keep others out with a firewall" (toString (get .Values.proxy "metricsBindAddress"))) -}}
{{- end -}}
{{- range .Values.extraArgs -}}
{{- if regexMatch "^--probe-bind-address(=|$)" . -}}
{{- fail "extraArgs: set ipvs.probeBindAddress instead of --probe-bind-address, because the probes use it" -}}
{{- end -}}
{{- end -}}
{{- if get .Values.ipvs "manifests" -}}
{{- fail "ipvs.manifests cannot be used in the chart: the pod reads the API server, and mounts no folder of manifests" -}}
{{- end -}}
{{- if ne (default "/run/kube-ipvs" (get .Values.ipvs "stateDir")) "/run/kube-ipvs" -}}
{{- fail "ipvs.stateDir must be /run/kube-ipvs, the only writable folder of the node that the pod mounts" -}}
{{- end -}}
{{- end -}}

{{- define "kube-ipvs.metricsOnLoopback" -}}
{{- $address := toString (get .Values.proxy "metricsBindAddress") -}}
{{- if or (eq $address "") (hasPrefix "127." $address) (hasPrefix "[::1]" $address) (eq $address "::1") (hasPrefix "localhost" $address) -}}true{{- end -}}
{{- end -}}

{{- define "kube-ipvs.metricsPort" -}}
{{- $port := regexFind "[^:]:[0-9]+$" (toString (get .Values.proxy "metricsBindAddress")) -}}
{{- default "10249" (regexFind "[0-9]+$" $port) -}}
{{- end -}}

{{- define "kube-ipvs.probeAddress" -}}
{{- if hasKey .Values.ipvs "probeBindAddress" -}}
{{- .Values.ipvs.probeBindAddress -}}
{{- else -}}
127.0.0.1:10266
{{- end -}}
{{- end -}}

{{/* Number of the probes' port; empty if ipvs.probeBindAddress is. */}}
{{- define "kube-ipvs.probePort" -}}
{{- regexFind "[0-9]+$" (include "kube-ipvs.probeAddress" .) -}}
{{- end -}}

{{/* Port and host of the probes; empty if ipvs.probeBindAddress is. */}}
{{- define "kube-ipvs.probeAt" -}}
{{- with include "kube-ipvs.probePort" . -}}
{{- $host := trimSuffix (printf ":%s" .) (include "kube-ipvs.probeAddress" $) | trimAll "[]" -}}
{{- if or (eq $host "0.0.0.0") (eq $host "::") -}}
{{- $host = "127.0.0.1" -}}
{{- end -}}
port: {{ ternary "probes" . $.Values.containerPorts }}, host: {{ $host | quote }}
{{- end -}}
{{- end -}}

{{/*
The ConfigMap's data. The chart's own fields are merged with those of the values, so
that --set proxy.clientConnection.qps=50 does not drop the kubeconfig.
*/}}
{{- define "kube-ipvs.data" -}}
{{- $proxy := mustMergeOverwrite (dict
      "apiVersion" "kubeproxy.config.k8s.io/v1alpha1"
      "kind" "KubeProxyConfiguration"
      "mode" "ipvs"
      "clientConnection" (dict "kubeconfig" "/var/lib/kube-ipvs/kubeconfig.yaml"))
    (deepCopy .Values.proxy) -}}
{{- $own := dict "apiVersion" "kube-ipvs.io/v1alpha1" "kind" "KubeIPVSConfiguration" -}}
{{- with .Values.profile -}}
{{- $_ := set $own "compat" . -}}
{{- end -}}
{{- $own = mustMergeOverwrite $own (deepCopy .Values.ipvs) -}}
config.yaml: |
  {{- toYaml $proxy | nindent 2 }}
  ---
  {{- toYaml $own | nindent 2 }}
kubeconfig.yaml: |
  apiVersion: v1
  kind: Config
  clusters:
    - name: default
      cluster:
        certificate-authority: /var/run/secrets/kubernetes.io/serviceaccount/ca.crt
        server: {{ .Values.apiServer }}
  contexts:
    - name: default
      context: {cluster: default, namespace: default, user: default}
  current-context: default
  users:
    - name: default
      user:
        tokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token
{{- end -}}

{{/* The name changes with the content, so that a change is a rollout of the DaemonSet. */}}
{{- define "kube-ipvs.configName" -}}
{{ include "kube-ipvs.name" . }}-{{ include "kube-ipvs.data" . | sha256sum | trunc 10 }}
{{- end -}}
