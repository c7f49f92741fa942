package reliability

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

const head = `# Faults

What becomes of Services when something goes wrong, as tests have found it.
This page is written by ` + "`make reliability`" + ` from what the tests themselves have
counted; do not edit. Each part says when it was last measured: ` + "`make help`" + ` lists
what runs one kind by itself. All tests but those of ` + "`make fuzz`" + ` run in CI too,
with fewer repetitions.
`

// Page makes the page of the figures in a folder. Of a section without any it
// says so.
func Page(folder string) (string, error) {
	var b strings.Builder
	b.WriteString(head)
	for _, s := range sections {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n", s.Title, s.Claims)
		files, err := filepath.Glob(filepath.Join(folder, s.Key+"-*.json")) // sorted
		if err != nil {
			return "", err
		}
		if len(files) == 0 {
			b.WriteString("\nNot measured.\n")
		}
		for _, file := range files {
			if err := writePart(&b, file); err != nil {
				return "", fmt.Errorf("%s: %w", file, err)
			}
		}
	}
	return b.String(), nil
}

func writePart(b *strings.Builder, file string) error {
	var p Part
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(b, "\n`%s`, in %s s, on %s, %s, %s:\n\n| | | |\n|---|---|---|\n",
		p.Test, Round(p.Seconds), p.Date.Format("2006-01-02 15:04 MST"), p.Version, p.Kernel)
	for _, f := range p.Figures {
		fmt.Fprintf(b, "| %s | %s | %s |\n", f.Name, strings.TrimSpace(Round(f.Value)+" "+f.Unit), f.Shows)
	}
	return nil
}

// Round shows whole numbers as they are, and three digits of others.
func Round(v float64) string {
	switch a := math.Abs(v); {
	case v == math.Trunc(v) || a >= 100:
		return thousands(strconv.FormatFloat(v, 'f', 0, 64))
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	case a >= 1:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3f", v)
}

// thousands writes 44125 as 44,125.
func thousands(digits string) string {
	for i := len(digits) - 3; i > 0 && digits[i-1] != '-'; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}
