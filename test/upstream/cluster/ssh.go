package cluster

import (
	"crypto/ed25519"
	"encoding/base64"
	"encoding/binary"
	"encoding/pem"
	"os"
	"path/filepath"
)

// SSHKey is the file with the key to the nodes, for SSHUser: some of upstream's tests run
// commands there.
func (c *Config) SSHKey() string { return filepath.Join(c.state(), "ssh.key") }

// SSHUser is the only user of a node.
const SSHUser = "root"

// writeSSHKey creates the key, and returns its authorized_keys line.
func (c *Config) writeSSHKey() (authorized string, err error) {
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		return "", err
	}
	return authorizedKey(public), os.WriteFile(c.SSHKey(), privateKey(private), 0o600)
}

// privateKey returns the key in the format of OpenSSH's PROTOCOL.key, the only one that
// ssh reads for this kind of key: without encryption, with one key, padded to blocks of
// 8.
func privateKey(key ed25519.PrivateKey) []byte {
	public := fields(keyKind, string(key.Public().(ed25519.PublicKey)))
	const check = "\x00\x00\x00\x00" // twice the same number
	private := append([]byte(check+check), public...)
	private = append(private, fields(string(key), "")...) // without a comment
	for i := byte(1); len(private)%8 != 0; i++ {
		private = append(private, i)
	}
	text := []byte("openssh-key-v1\x00")
	text = append(text, fields("none", "none", "")...)
	text = binary.BigEndian.AppendUint32(text, 1)
	text = append(text, fields(string(public), string(private))...)
	return pem.EncodeToMemory(&pem.Block{Type: "OPENSSH PRIVATE KEY", Bytes: text})
}

const keyKind = "ssh-ed25519"

// fields returns strings in SSH's format, each after its length.
func fields(parts ...string) (out []byte) {
	for _, part := range parts {
		out = append(binary.BigEndian.AppendUint32(out, uint32(len(part))), part...)
	}
	return out
}

// authorizedKey returns a line of a file authorized_keys. RFC 8709, section 4, defines
// the format of the key.
func authorizedKey(public ed25519.PublicKey) string {
	return keyKind + " " + base64.StdEncoding.EncodeToString(fields(keyKind, string(public))) + "\n"
}
