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

const head = `# Reliability

Tests inject faults and record what happens to Services. ` + "`make reliability`" + ` writes this
page from their figures; do not edit it. Each part shows when it was last measured.
` + "`make help`" + ` lists the targets for each kind of fault. All tests except those of
` + "`make fuzz`" + ` also run in CI, with fewer repetitions.
`

// Page returns the page for the figures in a directory. It marks a section without
// figures as not measured.
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
	fmt.Fprintf(b, "\n`%s`, in %s s, on %s, %s, %s:\n\n| what | figure | remarks |\n|---|---|---|\n",
		p.Test, Round(p.Seconds), p.Date.Format("2006-01-02 15:04 MST"), p.Version, p.Kernel)
	for _, f := range p.Figures {
		fmt.Fprintf(b, "| %s | %s | %s |\n", f.Name, strings.TrimSpace(Round(f.Value)+" "+f.Unit), f.Shows)
	}
	return nil
}

// Round formats whole numbers as they are, and others with three digits.
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
