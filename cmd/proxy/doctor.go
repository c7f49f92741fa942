package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kube-ipvs/kube-ipvs/pkg/doctor"
	"github.com/kube-ipvs/kube-ipvs/pkg/inspect"
)

func newDoctorCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Look for what keeps this node from serving Services",
		Long:  "doctor looks at this node's kernel, interfaces, rules and processes for what keeps\nServices from being served, and names the cure. Nothing is changed. It fails if it\nfinds an error.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			findings := doctor.Examine(doctor.Observe())
			if err := printFindings(cmd, output, findings); err != nil {
				return err
			}
			if doctor.Sick(findings) {
				return errors.New("this node does not serve Services as it should")
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	completeOutput(cmd, "text", "json")
	return cmd
}

func printFindings(cmd *cobra.Command, output string, findings []doctor.Finding) error {
	switch output {
	case "text":
		return doctor.Write(cmd.OutOrStdout(), findings)
	case "json":
		if findings == nil {
			findings = []doctor.Finding{} // an empty list, not null
		}
		return inspect.WriteJSON(cmd.OutOrStdout(), findings)
	}
	return fmt.Errorf("--output %q: must be text or json", output)
}
