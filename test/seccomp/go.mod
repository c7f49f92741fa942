module github.com/kube-ipvs/kube-ipvs/test/seccomp

go 1.26.0

require (
	github.com/moby/profiles/seccomp v0.2.3
	github.com/opencontainers/runtime-spec v1.2.1
	golang.org/x/sys v0.33.0
)
