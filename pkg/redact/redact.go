// Package redact removes secrets from text that leaves a node or a cluster, such as a bug
// report.
package redact

import (
	"bytes"
	"regexp"
)

// secrets match bearer tokens, private keys, and passwords in URLs.
var secrets = regexp.MustCompile(`eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----|://[^/\s:@]+:[^/\s@]+@`)

// Secrets returns a text in which everything that looks like a secret is replaced by
// REDACTED.
func Secrets(text []byte) []byte {
	return secrets.ReplaceAllFunc(text, func(secret []byte) []byte {
		if bytes.HasPrefix(secret, []byte("://")) {
			return []byte("://REDACTED@")
		}
		return []byte("REDACTED")
	})
}
