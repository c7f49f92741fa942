module github.com/kube-ipvs/kube-ipvs/test/sbom

go 1.26.0

require (
	github.com/CycloneDX/cyclonedx-go v0.10.0
	github.com/santhosh-tekuri/jsonschema/v6 v6.0.2
)

require golang.org/x/text v0.14.0 // indirect
