package main

import (
	"os"
	"path/filepath"
	"testing"
)

func write(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, nil, 0o755); err != nil {
		t.Fatal(err)
	}
}

func TestFinish(t *testing.T) {
	root := t.TempDir()
	for _, name := range []string{
		"usr/sbin/iptables-apply", "usr/share/doc/kmod/copyright", "usr/share/doc/kmod/changelog.gz", "usr/share/doc/kmod/contents",
		"usr/share/doc/kmod/README", "usr/lib/x/gconv/A.so",
	} {
		write(t, filepath.Join(root, name))
	}
	for _, name := range programs {
		write(t, filepath.Join(root, "usr/sbin", name))
	}
	if err := finish(root); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{
		"usr/sbin/iptables-nft": true, "usr/sbin/ip6tables-legacy-restore": true, "usr/sbin/iptables": true, "usr/sbin/ip6tables-restore": true, "usr/share/doc/kmod/copyright": true, "usr/share/doc/kmod/README": false,
		"usr/share/doc/kmod/changelog.gz": false, "usr/share/doc/kmod/contents": false, "usr/lib/x/gconv": false, "usr/sbin/iptables-apply": false,
	} {
		if _, err := os.Stat(filepath.Join(root, name)); (err == nil) != want {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range programs {
		path := filepath.Join(root, "usr/sbin", name)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if err := finish(root); err == nil {
			t.Errorf("no error where there is no %s", name)
		}
		write(t, path)
	}
}

func TestTagOf(t *testing.T) {
	if got := tagOf("v0.1.0-dev+abc"); got != "v0.1.0-dev-abc" {
		t.Error(got)
	}
}

// TestLabels: registries link the image to its sources, and scanners to its version.
func TestLabels(t *testing.T) {
	got := labels("v1.2.3", "abc")
	for name, want := range map[string]string{"version": "v1.2.3", "revision": "abc", "source": home, "url": home} {
		if value := got["org.opencontainers.image."+name]; value != want {
			t.Errorf("%s is %q, want %q", name, value, want)
		}
	}
	for name, value := range got {
		if value == "" {
			t.Errorf("%s is empty", name)
		}
	}
}
