package control

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// User is the identity of a client.
type User struct {
	Name   string
	Groups []string
}

// Admin may do everything.
var Admin = User{Name: "admin", Groups: []string{"system:masters"}}

// identity is the API server's certificate, which is its own authority, and the tokens
// that it accepts from clients.
type identity struct {
	certificateFile, keyFile, tokenFile string
	certificate                         []byte
	tokens                              map[string]string // by user name
	pool                                *x509.CertPool
}

// newIdentity creates the identity of a server at the addresses, with its files in dir.
// The server accepts Admin and the other users.
func newIdentity(dir string, users []User, addresses ...string) (*identity, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	certificate, err := selfSigned(key, addresses)
	if err != nil {
		return nil, err
	}
	encodedKey, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	id := &identity{
		certificateFile: filepath.Join(dir, "server.crt"),
		keyFile:         filepath.Join(dir, "server.key"),
		tokenFile:       filepath.Join(dir, "tokens.csv"),
		certificate:     pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate}),
		tokens:          map[string]string{},
	}
	var table strings.Builder
	for _, user := range append([]User{Admin}, users...) {
		id.tokens[user.Name] = rand.Text()
		fmt.Fprintf(&table, "%s,%s,%s,%q\n", id.tokens[user.Name], user.Name, user.Name, strings.Join(user.Groups, ","))
	}
	if id.pool, err = newPool(id.certificate); err != nil {
		return nil, err
	}
	for path, content := range map[string][]byte{
		id.certificateFile: id.certificate,
		id.keyFile:         pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: encodedKey}),
		id.tokenFile:       []byte(table.String()),
	} {
		if err := os.WriteFile(path, content, 0o600); err != nil {
			return nil, err
		}
	}
	return id, nil
}

func selfSigned(key *ecdsa.PrivateKey, addresses []string) ([]byte, error) {
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "kube-apiserver"},
		NotBefore:             now.Add(-time.Hour),
		NotAfter:              now.AddDate(0, 0, 7),
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	for _, address := range addresses {
		template.IPAddresses = append(template.IPAddresses, net.ParseIP(address))
	}
	return x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
}

const kubeconfigFormat = `apiVersion: v1
kind: Config
current-context: lab
contexts:
- name: lab
  context: {cluster: lab, user: %[3]q}
clusters:
- name: lab
  cluster:
    server: %[1]s
    certificate-authority-data: %[2]s
users:
- name: %[3]q
  user: {token: %[4]q}
`

func (id *identity) kubeconfig(url, user string) []byte {
	return fmt.Appendf(nil, kubeconfigFormat, url, base64.StdEncoding.EncodeToString(id.certificate), user, id.tokens[user])
}
