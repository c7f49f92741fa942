package doctor

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/kube-ipvs/kube-ipvs/pkg/ip"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel"
	"github.com/kube-ipvs/kube-ipvs/pkg/trace"
)

// Observe reads the node. What cannot be read is a fact, too.
func Observe() *Facts {
	f := &Facts{Proxies: processes("/proc", os.Getpid()), Tables: tables()}
	f.readNodes()
	f.Connections = number("/proc/sys/net/netfilter/nf_conntrack_count")
	f.Most = number("/proc/sys/net/netfilter/nf_conntrack_max")
	return f
}

func (f *Facts) readNodes() {
	kernel, err := trace.Read()
	if err != nil {
		f.Unread = append(f.Unread, err)
		return
	}
	for _, family := range ip.Families {
		node, err := kernel.Node(family)
		if err != nil {
			f.Unread = append(f.Unread, fmt.Errorf("%s cannot be read: %w", family, err))
			continue
		}
		f.Nodes = append(f.Nodes, node)
	}
}

// number reads a file with one; what is not there counts as 0.
func number(file string) int {
	text, _ := os.ReadFile(file)
	n, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return n
}

// processes finds those of service proxies, but this one's own.
func processes(proc string, self int) map[string][]int {
	out := map[string][]int{}
	files, _ := filepath.Glob(filepath.Join(proc, "[0-9]*", "comm"))
	for _, file := range files {
		text, err := os.ReadFile(file)
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		name := strings.TrimSpace(string(text))
		if err == nil && pid != self && (name == "kube-proxy" || name == "kube-ipvs") {
			out[name] = append(out[name], pid)
		}
	}
	return out
}

// tables lists those of nftables, where nft(8) is at hand.
func tables() []string {
	text, _, err := kernel.Run("nft", "", "--json", "list", "tables")
	if err != nil {
		return nil
	}
	var list struct {
		NFTables []struct {
			Table *struct{ Family, Name string }
		}
	}
	if json.Unmarshal([]byte(text), &list) != nil {
		return nil
	}
	var out []string
	for _, entry := range list.NFTables {
		if t := entry.Table; t != nil {
			out = append(out, t.Family+" "+t.Name)
		}
	}
	return out
}
