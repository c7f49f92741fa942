package apiserver

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/document"
)

// The role in deploy allows exactly what the source uses, and creating Events (all that
// package event does).
func TestRoleAllowsWhatIsUsed(t *testing.T) {
	client, sink, _ := start(t)
	sink.await(t, "synced")
	// A watch may begin a moment after its list.
	for deadline := time.Now().Add(30 * time.Second); len(client.Actions()) < 10 && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	used := map[string]bool{"create events.k8s.io/events": true}
	for _, a := range client.Actions() {
		r := a.GetResource()
		used[fmt.Sprintf("%s %s/%s", a.GetVerb(), r.Group, r.Resource)] = true
	}
	allowed := map[string]bool{}
	for _, rule := range role(t).Rules {
		for _, verb := range rule.Verbs {
			for _, resource := range rule.Resources {
				allowed[fmt.Sprintf("%s %s/%s", verb, rule.APIGroups[0], resource)] = true
			}
		}
	}
	if diff := cmp.Diff(used, allowed); diff != "" {
		t.Errorf("used (-), allowed (+):\n%s", diff)
	}
}

func role(t *testing.T) rbacv1.ClusterRole {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "deploy", "base", "rbac.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	docs := document.Split(text)
	var role rbacv1.ClusterRole
	at := slices.IndexFunc(docs, func(d document.Document) bool {
		loose, err := d.Decode(&role)
		return err == nil && len(loose) == 0 && role.Kind == "ClusterRole"
	})
	if at < 0 {
		t.Fatal("no ClusterRole")
	}
	return role
}
