package config

import (
	"cmp"
	"errors"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	proxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"

	"github.com/kube-ipvs/kube-ipvs/pkg/document"
)

// file is the content of a configuration file, with defaults.
type file struct {
	proxy   proxyv1alpha1.KubeProxyConfiguration
	own     KubeIPVSConfiguration
	notices []string
	found   map[metav1.TypeMeta]bool
}

// readFile reads a configuration file and applies the defaults of the profile, or of
// the profile that the file names if the argument is empty. It returns an error if the
// file cannot be read or decoded, contains another kind of document, or contains a kind
// twice.
func readFile(name, profile string) (*file, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("--config: %w", err)
	}
	f, err := parseFile(text, profile)
	if err != nil {
		return nil, fmt.Errorf("--config: %s: %w", name, err)
	}
	for i := range f.notices {
		f.notices[i] = name + ": " + f.notices[i]
	}
	return f, nil
}

// parseFile parses the text of a file for readFile. It returns all errors joined.
func parseFile(text []byte, profile string) (*file, error) {
	f := &file{found: map[metav1.TypeMeta]bool{}}
	docs := document.Split(text)
	profile = cmp.Or(profile, profileOf(docs))
	setOwnCompat(&f.own, profile)
	if len(docs) == 0 {
		return nil, errors.New("no document")
	}
	var errs []error
	for _, d := range docs {
		if err := f.add(d); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", d, err))
		}
	}
	setProxyCompat(&f.proxy, profile)
	setProxyDefaults(&f.proxy)
	setOwnDefaults(&f.own)
	f.notices = append(f.notices, ignoredFields(&f.proxy)...)
	return f, errors.Join(errs...)
}

// profileOf returns the profile that a file names. Errors are reported later.
func profileOf(docs []document.Document) string {
	for _, d := range docs {
		var own struct {
			metav1.TypeMeta `json:",inline"`
			Compat          string `json:"compat"`
		}
		if _, err := d.Decode(&own); err == nil && own.Kind == OwnKind && own.APIVersion == OwnAPIVersion {
			return own.Compat
		}
	}
	return ""
}

// add decodes one document.
func (f *file) add(d document.Document) error {
	var kind metav1.TypeMeta
	if _, err := d.Decode(&kind); err != nil {
		return err
	}
	if f.found[kind] {
		return fmt.Errorf("a second %s", kind.Kind)
	}
	f.found[kind] = true
	switch kind {
	case metav1.TypeMeta{APIVersion: proxyv1alpha1.SchemeGroupVersion.String(), Kind: proxyKind}:
		return f.addProxy(d)
	case metav1.TypeMeta{APIVersion: OwnAPIVersion, Kind: OwnKind}:
		return f.addOwn(d)
	}
	return fmt.Errorf("apiVersion %q, kind %q: must be %s %s or %s %s", kind.APIVersion, kind.Kind,
		proxyv1alpha1.SchemeGroupVersion, proxyKind, OwnAPIVersion, OwnKind)
}

// addProxy accepts unknown fields, as kube-proxy does: files may have been written for
// any version.
func (f *file) addProxy(d document.Document) error {
	loose, err := d.Decode(&f.proxy)
	for _, l := range loose {
		f.notices = append(f.notices, fmt.Sprintf("%s: %v: ignored", d, l))
	}
	return err
}

// addOwn rejects unknown fields: no file of ours predates them.
func (f *file) addOwn(d document.Document) error {
	loose, err := d.Decode(&f.own)
	return errors.Join(append(loose, err)...)
}

// ignoredFields returns a notice for each field of other modes and platforms that is
// not at its default.
func ignoredFields(c *proxyv1alpha1.KubeProxyConfiguration) []string {
	var d proxyv1alpha1.KubeProxyConfiguration
	setProxyDefaults(&d)
	differ := func(a, b any) bool { return !equality.Semantic.DeepEqual(a, b) }
	var notices []string
	for _, f := range []struct {
		field string
		set   bool
	}{
		{"iptables.syncPeriod", differ(c.IPTables.SyncPeriod, d.IPTables.SyncPeriod)},
		{"iptables.minSyncPeriod", differ(c.IPTables.MinSyncPeriod, d.IPTables.MinSyncPeriod)},
		{"nftables", differ(c.NFTables, d.NFTables)},
		{"winkernel", differ(c.Winkernel, d.Winkernel)},
		{"portRange", c.PortRange != ""},
		{"windowsRunAsService", c.WindowsRunAsService},
	} {
		if f.set {
			notices = append(notices, f.field+" has no effect: it is for another proxy mode or platform")
		}
	}
	return notices
}
