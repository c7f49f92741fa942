package deploy

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// TestPods checks that the Pods that the guides run on a node can read there what the
// DaemonSet reads: they mount the same places, and have no other account.
func TestPods(t *testing.T) {
	var set appsv1.DaemonSet
	if err := yaml.UnmarshalStrict([]byte(read(t, "base/daemonset.yaml")), &set); err != nil {
		t.Fatal(err)
	}
	spec := set.Spec.Template.Spec
	for _, file := range []string{"preflight.yaml", "cleanup.yaml"} {
		var pod corev1.Pod
		if err := yaml.UnmarshalStrict([]byte(read(t, file)), &pod); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if account := pod.Spec.ServiceAccountName; account != "" && account != spec.ServiceAccountName {
			t.Errorf("%s: account %q, want %q", file, account, spec.ServiceAccountName)
		}
		if !pod.Spec.HostNetwork || pod.Spec.NodeName != "NODE_NAME" || pod.Namespace != set.Namespace {
			t.Errorf("%s: is not a Pod of the node's network: %+v", file, pod.Spec)
		}
		// The guide selects the Pods of many nodes by a label, which is not the DaemonSet's.
		if name := pod.Labels["app.kubernetes.io/name"]; file == "cleanup.yaml" && (name == "" ||
			name == set.Spec.Selector.MatchLabels["app.kubernetes.io/name"] || !strings.Contains(read(t, "../docs/guides/migrate.md"), "--selector app.kubernetes.io/name="+name+" ")) {
			t.Errorf("%s: the label %q is not the guide's", file, name)
		}
		// The host name may be another one than the Node's.
		if args := pod.Spec.Containers[0].Args; file == "preflight.yaml" && !slices.Contains(args, "--hostname-override="+pod.Spec.NodeName) {
			t.Errorf("%s: %q does not name the Node", file, args)
		}
		for _, mount := range pod.Spec.Containers[0].VolumeMounts {
			if !slices.ContainsFunc(spec.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == mount.MountPath && m.Name == mount.Name }) {
				t.Errorf("%s: mounts %s as %s, the DaemonSet does not", file, mount.Name, mount.MountPath)
			}
		}
		for _, volume := range pod.Spec.Volumes {
			if volume.Name == "config" {
				continue // the guide names the ConfigMap
			}
			if !slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool {
				return v.Name == volume.Name && v.HostPath != nil && volume.HostPath != nil && v.HostPath.Path == volume.HostPath.Path
			}) {
				t.Errorf("%s: the volume %s is not the DaemonSet's", file, volume.Name)
			}
		}
	}
}
