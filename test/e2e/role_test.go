//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/kube-ipvs/kube-ipvs/pkg/document"
	"github.com/kube-ipvs/kube-ipvs/test/e2e/lab"
	"github.com/kube-ipvs/kube-ipvs/test/reliability"
)

// TestReliabilityRole runs the process as the ServiceAccount of deploy, with the API
// server's own authorizer. The ClusterRole is sufficient, and for each removed permission
// the log names what is missing. Most runs test every third permission.
func TestReliabilityRole(t *testing.T) {
	record := reliability.Begin(t, reliability.Security, "role")
	c := newCluster(t)
	a := c.api.deployAccount()
	c.flags = []string{"--kubeconfig", a.kubeconfig}
	svc := newAnnotated("web", 1, map[string]string{"scheduler": "maglev"}) // causes an Event
	for _, slice := range dualStackSlices(svc, webPort, ready(c.web1), ready(c.web2)) {
		c.api.addSlice(slice)
	}
	c.api.addService(svc)
	node := c.Nodes[0]
	c.startProxy(0)
	c.theEvent(t, svc)
	asked := 0
	for _, vip := range clusterIPs(1) {
		for _, from := range []*lab.Namespace{c.caller1.Namespace, node.Namespace} {
			asked++
			if answer := from.Dial(lab.TCP, at(vip, 80)); answer.Err != nil {
				t.Errorf("from %s: %s", from.Name, answer)
			}
		}
	}
	c.proxies[0].Terminate()
	refused := forbidden(c.proxies[0].Log())
	if len(refused) > 0 {
		t.Errorf("with all permissions: %q", refused)
	}
	permissions := permissionsOf(a.role)
	taken := 0
	for i := 0; i < len(permissions); i += reliability.Times(3, 1) {
		taken++
		t.Run("without "+permissions[i].String(), func(t *testing.T) { a.checkWithout(t, c, permissions[i]) })
	}
	record(
		reliability.Figure{Name: "permissions of the ClusterRole", Value: float64(len(permissions)), Shows: "checked by the API server's authorizer for the ServiceAccount's token"},
		reliability.Figure{Name: "requests that the authorizer refused", Value: float64(len(refused)), Shows: "from the start until a Service answers and an Event is written"},
		reliability.Figure{Name: "connections to the Service", Value: float64(asked), Shows: "from a pod and from the node, IPv4 and IPv6, all answered"},
		reliability.Figure{Name: "permissions removed, one at a time", Value: float64(taken), Shows: "each time the log named the verb and the resource"},
	)
}

// forbidden returns the log lines about missing permissions.
func forbidden(log string) []string {
	return slices.DeleteFunc(strings.Split(log, "\n"), func(line string) bool { return !strings.Contains(line, "forbidden") })
}

// account holds the objects that deploy creates for the process in the API server.
type account struct {
	api        *api
	role       rbacv1.ClusterRole
	kubeconfig string // with a token of the ServiceAccount
}

// deployAccount creates the objects of deploy/base/rbac.yaml.
func (a *api) deployAccount() *account {
	a.t.Helper()
	out := &account{api: a}
	var service corev1.ServiceAccount
	var binding rbacv1.ClusterRoleBinding
	docs := document.Split(sourceFile(a.t, "deploy", "base", "rbac.yaml"))
	for i, object := range []any{&service, &out.role, &binding} {
		_, err := docs[i].Decode(object)
		a.must(err)
	}
	ctx, namespace := a.t.Context(), binding.Subjects[0].Namespace
	accounts, roles, bindings := a.client.CoreV1().ServiceAccounts(namespace), a.client.RbacV1().ClusterRoles(), a.client.RbacV1().ClusterRoleBindings()
	_, err := accounts.Create(ctx, &service, metav1.CreateOptions{})
	a.must(err)
	_, err = roles.Create(ctx, &out.role, metav1.CreateOptions{})
	a.must(err)
	_, err = bindings.Create(ctx, &binding, metav1.CreateOptions{})
	a.must(err)
	a.undo = append(a.undo, func(ctx context.Context) error {
		return errors.Join(bindings.Delete(ctx, binding.Name, metav1.DeleteOptions{}), roles.Delete(ctx, out.role.Name, metav1.DeleteOptions{}),
			accounts.Delete(ctx, service.Name, metav1.DeleteOptions{}))
	})
	token, err := accounts.CreateToken(ctx, service.Name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	a.must(err)
	config, err := clientcmd.LoadFromFile(lab.Kubeconfig())
	a.must(err)
	for user := range config.AuthInfos {
		config.AuthInfos[user] = &clientcmdapi.AuthInfo{Token: token.Status.Token}
	}
	out.kubeconfig = filepath.Join(a.t.TempDir(), "kubeconfig")
	a.must(clientcmd.WriteToFile(*config, out.kubeconfig))
	out.mayAll(a.t, out.role)
	return out
}

// permission is one verb on one resource.
type permission struct{ verb, group, resource string }

func (p permission) String() string { return p.verb + " " + p.resource }

func permissionsOf(role rbacv1.ClusterRole) (out []permission) {
	for _, rule := range role.Rules {
		for _, resource := range rule.Resources {
			for _, verb := range rule.Verbs {
				out = append(out, permission{verb, rule.APIGroups[0], resource})
			}
		}
	}
	return out
}

// checkWithout removes a permission from the role and checks that a new process reports
// it.
func (a *account) checkWithout(t *testing.T, c *cluster, p permission) {
	less := a.role
	less.Rules = nil
	for _, has := range permissionsOf(a.role) {
		if has != p {
			less.Rules = append(less.Rules, rbacv1.PolicyRule{APIGroups: []string{has.group}, Resources: []string{has.resource}, Verbs: []string{has.verb}})
		}
	}
	a.set(t, less)
	defer a.set(t, a.role)
	want := fmt.Sprintf(`User "system:serviceaccount:kube-system:kube-ipvs" cannot %s resource "%s" in API group "%s"`, p.verb, p.resource, p.group)
	node := c.Nodes[0]
	process := node.StartProxy(func(process *lab.Process) error {
		log := strings.ReplaceAll(process.Log(), `\`, "") // errors are quoted
		if !strings.Contains(log, want) {
			return fmt.Errorf("the log does not have %q", want)
		}
		return nil
	}, "--hostname-override", node.Name, "--kubeconfig", a.kubeconfig, "--cluster-cidr", podCIDRs)
	process.Terminate()
}

// set changes the role and waits until the authorizer applies it.
func (a *account) set(t *testing.T, role rbacv1.ClusterRole) {
	t.Helper()
	role.ResourceVersion = "" // any version
	_, err := a.api.client.RbacV1().ClusterRoles().Update(t.Context(), &role, metav1.UpdateOptions{})
	a.api.must(err)
	a.mayAll(t, role)
}

// mayAll waits until the authorizer allows exactly what the role permits.
func (a *account) mayAll(t testing.TB, role rbacv1.ClusterRole) {
	t.Helper()
	allowed := permissionsOf(role)
	for _, p := range permissionsOf(a.role) {
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User:               "system:serviceaccount:kube-system:kube-ipvs",
			ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: p.verb, Group: p.group, Resource: p.resource},
		}}
		lab.Eventually(t, syncLimit, "the authoriser knows of the role", func() error {
			answer, err := a.api.client.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), review, metav1.CreateOptions{})
			if err == nil && answer.Status.Allowed != slices.Contains(allowed, p) {
				err = fmt.Errorf("%s: %+v", p, answer.Status)
			}
			return err
		})
	}
}
