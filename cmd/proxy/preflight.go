package main

import (
	"context"
	"net"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kube-ipvs/kube-ipvs/pkg/doctor"
	"github.com/kube-ipvs/kube-ipvs/pkg/health"
	"github.com/kube-ipvs/kube-ipvs/pkg/kernel/program"
	"github.com/kube-ipvs/kube-ipvs/pkg/nat"
)

func newPreflightCommand() *cobra.Command {
	var o settingsFlags
	var output string
	cmd := &cobra.Command{
		Use:   "preflight",
		Short: "Check whether kube-ipvs can replace kube-proxy on this node",
		Long:  "preflight checks a node on which kube-proxy runs: kernel features, the iptables back end,\ninterfaces and their routing tables, marks and priorities that other programs use,\nunusable Services, and what the first sync would change. Nothing is changed, and no\nkernel module is loaded.\n\nThe exit code is 0 if no error was found (there may be warnings), 1 if one was found,\nand 2 if the node could not be checked.",
		Example: "  kube-ipvs preflight --config /var/lib/kube-ipvs/config.yaml\n" +
			"  kube-ipvs preflight --kubeconfig FILE    # of a user who may list Services, EndpointSlices and Nodes",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := o.found(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return reportFindings(cmd, output, preflight(cmd.Context(), &s).Findings())
		},
	}
	o.addFlags(cmd.Flags())
	addOutput(cmd, cmd.Flags(), &output, "text", "json", "yaml")
	return cmd
}

func preflight(ctx context.Context, s *settings) *doctor.Preflight {
	facts := doctor.ObserveProxies(ctx)
	p := &doctor.Preflight{
		Release: doctor.Release(), IPTables: iptablesVariants(), Answers: facts.Answers, PIDs: facts.Proxies["kube-proxy"],
		Probes: s.Probes, Taken: taken(ctx, s), Config: s.Plan,
	}
	if choice, err := nat.Choose(); err == nil {
		p.Use, p.UseWhy, p.Unseen = choice.Use.String(), choice.Why, choice.Unseen
	}
	p.Modules = doctor.FindModules(doctor.LoadedModules, doctor.InstalledModules, p.Release, s.Plan.Scheduler)
	if links, err := net.Interfaces(); err == nil {
		for _, l := range links {
			p.Links = append(p.Links, l.Name)
		}
	}
	if servers := apiServers(&s.Source); len(servers) > 0 {
		p.APIServer = servers[0].String()
	}
	var unloaded []string
	for _, m := range p.Modules {
		if m.Loaded {
			continue
		}
		unloaded = append(unloaded, m.Name)
		if m.Name == "ip_vs" || m.Name == "ip_set" {
			p.Unloaded = append(p.Unloaded, m.Name)
		}
	}
	result, err := dryRun(ctx, s.Config, unloaded...)
	if err != nil {
		p.Err = err
		return p
	}
	p.Unusable, p.Services, p.Changes = result.unused, result.services, result.changes
	p.ClusterIPs = result.clusterIPs
	p.Warnings, p.Modes, p.Conflicts = result.warnings, result.modes, result.complaint
	return p
}

// taken returns why kube-ipvs could not listen on the address for probes, or "". A running
// kube-ipvs that listens there is no reason.
func taken(ctx context.Context, s *settings) string {
	if !s.Probes.IsValid() {
		return ""
	}
	if _, err := health.Ask(ctx, s.Probes); err == nil {
		return ""
	}
	l, err := net.Listen("tcp", s.Probes.String())
	if err != nil {
		return err.Error()
	}
	_ = l.Close()
	return ""
}

// iptablesVariants returns the installed iptables back ends with their rules of service
// proxies.
func iptablesVariants() []doctor.Variant {
	var out []doctor.Variant
	for _, variant := range []nat.Variant{nat.NFT, nat.Legacy, nat.Default} {
		name := variant.String()
		version, _, err := program.Run(name, "", "--version")
		if err != nil || variant == nat.Default && len(out) > 0 {
			continue // the plain name is one of the others
		}
		v := doctor.Variant{Name: name, Version: strings.TrimSpace(version)}
		rules, _, _ := program.Run(name+"-save", "") // no rules if they cannot be read
		for line := range strings.Lines(rules) {
			if strings.HasPrefix(line, "-A ") && strings.Contains(line, "KUBE-") {
				v.Rules++
			}
		}
		out = append(out, v)
	}
	return out
}
