package main

import (
	"os"
	"strings"
	"testing"
)

// sample is kept at what hack/sbom writes by that package's tests.
const sample = "../../hack/sbom/testdata/image.cdx.json"

func TestCheck(t *testing.T) {
	text, err := os.ReadFile(sample)
	if err != nil {
		t.Fatal(err)
	}
	if err := check(text); err != nil {
		t.Error(err)
	}
	for _, tc := range []struct{ old, replacement string }{
		{`"type": "container"`, `"type": "image"`},
		{`"alg": "SHA-256"`, `"alg": "SHA256"`},
		{`"specVersion": "1.6"`, `"spec": "1.6"`},
		{`"purl": "pkg:deb/`, `"packageURL": "pkg:deb/`},
		{`pkg:deb/debian/kmod@`, `kmod@`},
	} {
		broken := strings.Replace(string(text), tc.old, tc.replacement, 1)
		if broken == string(text) {
			t.Fatalf("the sample has no %s", tc.old)
		}
		if check([]byte(broken)) == nil {
			t.Errorf("%s is accepted", tc.replacement)
		}
	}
}
