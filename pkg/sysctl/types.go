// Package sysctl reads and writes kernel parameters under /proc/sys.
package sysctl

import "github.com/kube-ipvs/kube-ipvs/pkg/kernel"

// State maps keys, written with slashes as below /proc/sys ("net/ipv4/ip_forward"), to
// values without the trailing newline. Fields of a value are separated by one space.
//
// Keys have slashes because interface names may have dots: the key
// "net/ipv4/conf/eth0.100/rp_filter" needs no escape.
type State map[string]string

// Change sets one key.
type Change struct{ Key, Value string }

func (c Change) String() string { return "set sysctl " + c.Key + " to " + c.Value }

// Failure is a change that the kernel refused.
type Failure = kernel.Failure[Change]
