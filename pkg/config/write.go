package config

import (
	"fmt"
	"os"

	"sigs.k8s.io/yaml"
)

// Write writes the configuration with its defaults to a file that --config can read.
// The KubeProxyConfiguration comes first because kube-proxy reads only the first
// document.
func (c Config) Write(name string) error {
	text, err := c.marshal()
	if err != nil {
		return err
	}
	if err := os.WriteFile(name, text, 0o644); err != nil {
		return fmt.Errorf("--write-config-to: %w", err)
	}
	return nil
}

func (c Config) marshal() ([]byte, error) {
	proxy, err := yaml.Marshal(c.Proxy)
	if err != nil {
		return nil, err
	}
	own, err := yaml.Marshal(c.Own)
	if err != nil {
		return nil, err
	}
	return append(append(proxy, "---\n"...), own...), nil
}
