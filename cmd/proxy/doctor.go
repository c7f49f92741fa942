package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kube-ipvs/kube-ipvs/pkg/doctor"
	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
)

func newDoctorCommand() *cobra.Command {
	var o settingsFlags
	var output string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check this node for problems that affect Services",
		Long:  "doctor checks this node's kernel, interfaces, rules and processes for problems that\naffect Services, and names the fix. Nothing is changed. Each check that passes prints\na line with OK.\n\nThe exit code is 0 if no error was found (there may be warnings), 1 if one was found,\nand 2 if the node could not be checked.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := o.found(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			findings := doctor.Examine(doctor.Observe(cmd.Context(), &s.Plan, s.Probes))
			return reportFindings(cmd, output, findings)
		},
	}
	o.addFlags(cmd.Flags())
	addOutput(cmd, cmd.Flags(), &output, "text", "json", "yaml")
	return cmd
}

// reportFindings prints findings. It returns errFound if one of them is an error.
func reportFindings(cmd *cobra.Command, output string, findings []doctor.Finding) error {
	if err := printFindings(cmd, output, findings); err != nil {
		return err
	}
	if doctor.Sick(findings) {
		return errFound
	}
	return nil
}

func printFindings(cmd *cobra.Command, output string, findings []doctor.Finding) error {
	switch output {
	case "text":
		return doctor.Write(cmd.OutOrStdout(), findings)
	case "json":
		return inspect.WriteJSON(cmd.OutOrStdout(), findings)
	case "yaml":
		return inspect.WriteYAML(cmd.OutOrStdout(), findings)
	}
	return fmt.Errorf("--output %q: must be text, json or yaml", output)
}
