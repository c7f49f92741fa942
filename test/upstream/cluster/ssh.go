package cluster

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"encoding/pem"
	"os"
	"path/filepath"
)

// SSHKey is the file with the key to the nodes, and SSHUser whom it is for: some of
// upstream's tests run commands there.
func (c *Config) SSHKey() string { return filepath.Join(c.state(), "ssh.key") }

// SSHUser is the only one that a node has.
const SSHUser = "root"

// writeSSHKey makes the key, and returns the line that nodes know it by.
func (c *Config) writeSSHKey() (authorized string, err error) {
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		return "", err
	}
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return "", err
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	return authorizedKey(public), os.WriteFile(c.SSHKey(), text, 0o600)
}

// authorizedKey is a line of a file authorized_keys. The key's form is that of
// RFC 8709, section 4: two strings, each behind its length.
func authorizedKey(public ed25519.PublicKey) string {
	const kind = "ssh-ed25519"
	var key []byte
	for _, part := range []string{kind, string(public)} {
		key = append(binary.BigEndian.AppendUint32(key, uint32(len(part))), part...)
	}
	return kind + " " + base64.StdEncoding.EncodeToString(key) + "\n"
}
