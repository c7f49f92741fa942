// Package nft programs nftables directly: it writes kube-ipvs's own table, which makes node
// ports on 127.0.0.1 and ::1 reach remote endpoints, and removes the tables of kube-proxy's
// nftables mode. All other rules are written with iptables (package nat).
package nft

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"time"

	"sigs.k8s.io/knftables"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/generation"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/program"
)

// Table is the name of our table, and KubeProxyTable that of kube-proxy's, in each family.
const (
	Table          = "kube-ipvs"
	KubeProxyTable = "kube-proxy"
)

// runLimit limits a transaction or a listing by nft, which may wait for locks of other
// programs.
const runLimit = time.Minute

// Tables returns the names of all tables, such as "ip kube-ipvs".
//
// It runs nft itself because knftables lists one table of one family at a time: a resync
// of a node that has none of these tables would take two processes instead of one.
func Tables() ([]string, error) {
	text, stderr, err := program.Run("nft", "", "list", "tables")
	if err != nil {
		return nil, fmt.Errorf("nft list tables: %w: %s", err, strings.TrimSpace(stderr))
	}
	var tables []string
	for line := range strings.Lines(text) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "table "); ok {
			tables = append(tables, name)
		}
	}
	return tables, nil
}

// client accesses the table of one name in each family. It may be used concurrently, and
// acts on the network namespace of the calling thread.
type client struct {
	table string

	mu   sync.Mutex
	open map[ip.Family]knftables.Interface
}

// newClient finds nft in the PATH.
func newClient(table string) (*client, error) {
	if _, err := exec.LookPath("nft"); err != nil {
		return nil, fmt.Errorf("%w: install the package nftables", err)
	}
	return &client{table: table, open: map[ip.Family]knftables.Interface{}}, nil
}

// families returns the families that have the table.
func (c *client) families() ([]ip.Family, error) {
	tables, err := Tables()
	if err != nil {
		return nil, err
	}
	var out []ip.Family
	for _, f := range ip.Families {
		for _, t := range tables {
			if t == string(familyOf(f))+" "+c.table {
				out = append(out, f)
			}
		}
	}
	return out, nil
}

func familyOf(f ip.Family) knftables.Family {
	if f == ip.IPv6 {
		return knftables.IPv6Family
	}
	return knftables.IPv4Family
}

// in returns the knftables.Interface of a family. The first call runs nft twice, to check its
// version and the permission. It is therefore delayed until there is something to read or
// write.
func (c *client) in(f ip.Family) (knftables.Interface, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if known, ok := c.open[f]; ok {
		return known, nil
	}
	opened, err := knftables.New(familyOf(f), c.table)
	if err == nil {
		c.open[f] = opened
	}
	return opened, err
}

// replace replaces a family's table, in one transaction, by an empty one that fill completes.
// If fill is nil it deletes the table. It first creates a missing table, so that the deletion
// succeeds.
func (c *client) replace(f ip.Family, fill func(*knftables.Transaction)) error {
	tables, err := c.in(f)
	if err != nil {
		return err
	}
	tx := tables.NewTransaction()
	replaceTable(tx, fill)
	ctx, cancel := context.WithTimeout(context.Background(), runLimit)
	defer cancel()
	return generation.Change(1, func() error { return tables.Run(ctx, tx) })
}

func replaceTable(tx *knftables.Transaction, fill func(*knftables.Transaction)) {
	tx.Add(&knftables.Table{})
	tx.Delete(&knftables.Table{})
	if fill != nil {
		tx.Add(&knftables.Table{})
		fill(tx)
	}
}

// rules returns the rules of a family's table.
func (c *client) rules(f ip.Family) ([]*knftables.Rule, error) {
	tables, err := c.in(f)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), runLimit)
	defer cancel()
	return tables.ListRules(ctx, "")
}
