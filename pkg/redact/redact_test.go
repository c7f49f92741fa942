package redact

import "testing"

func TestSecrets(t *testing.T) {
	for text, want := range map[string]string{
		"Authorization: Bearer eyJhbGciOiJSUzI1.eyJpc3MiOiJrdWJl.c2ln x":             "Authorization: Bearer REDACTED x",
		"a\n-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nb": "a\nREDACTED\nb",
		"https://admin:hunter2@10.0.0.10:6443/":                                      "https://REDACTED@10.0.0.10:6443/",
		"TCP 10.96.0.1:443, [fd00::1]:53 eyJ":                                        "TCP 10.96.0.1:443, [fd00::1]:53 eyJ",
	} {
		if got := string(Secrets([]byte(text))); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
