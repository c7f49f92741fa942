// Package kubeproxy gives package apply the names of package nft.
package kubeproxy

import "github.com/kube-ipvs/kube-ipvs/pkg/nft"

type (
	State   = nft.KubeProxy
	Change  = nft.KubeProxyChange
	Failure = nft.KubeProxyFailure
	Fake    = nft.FakeKubeProxy
)

func NewFake(state State) *Fake { return nft.NewFakeKubeProxy(state) }
