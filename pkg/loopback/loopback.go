// Package loopback gives package apply the names of package nft.
package loopback

import "github.com/kube-ipvs/kube-ipvs/pkg/nft"

type (
	State    = nft.Loopback
	Exchange = nft.Exchange
	Change   = nft.LoopbackChange
	Failure  = nft.LoopbackFailure
	Fake     = nft.FakeLoopback
)

const Table = nft.Table

func NewFake() *Fake                 { return nft.NewFakeLoopback() }
func Diff(have, want State) []Change { return nft.DiffLoopback(have, want) }
