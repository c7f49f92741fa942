package walk

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Block is a block of commands of a page.
type Block struct {
	// Page is the file's name below the checkout, and Line that of the first command.
	Page string
	Line int
	// Section is the heading above the block, and Index counts the section's blocks.
	Section string
	Index   int
	Text    string
}

func (b *Block) String() string { return fmt.Sprintf("%s:%d", b.Page, b.Line) }

// Blocks returns the indented blocks of a page. Fenced ones show output, and are not
// meant to be copied.
func Blocks(source, page string) ([]*Block, error) {
	text, err := os.ReadFile(filepath.Join(source, page))
	if err != nil {
		return nil, err
	}
	return parse(page, string(text)), nil
}

const indent = "    "

func parse(page, text string) (blocks []*Block) {
	var section string
	var block *Block
	// A line that continues a paragraph or a list may be indented, too.
	fenced, blank, index := false, true, 0
	for i, line := range strings.Split(text, "\n") {
		switch {
		case strings.HasPrefix(line, "```"):
			fenced = !fenced
		case fenced:
		case strings.HasPrefix(line, "#"):
			section, index, block = strings.TrimLeft(line, "# "), 0, nil
		case strings.HasPrefix(line, indent) && (blank || block != nil):
			if block == nil {
				block = &Block{Page: page, Line: i + 1, Section: section, Index: index}
				blocks = append(blocks, block)
				index++
			}
			block.Text += strings.TrimPrefix(line, indent) + "\n"
		default:
			block = nil
		}
		blank = line == ""
	}
	return blocks
}

// script returns the block as a script that fails where a reader would see that
// something is wrong: a command whose comment is "nothing" must print nothing.
func (b *Block) script() string { return nothing.ReplaceAllString(b.Text, silent) }

var nothing = regexp.MustCompile(`(?m)^(.*\S) +# nothing$`)

const silent = `printed=$$($1) || true; [ -z "$$printed" ] || { echo "printed: $$printed"; exit 1; }`

// set returns the block with other values of its assignments. Each value must be in the
// block.
func (b *Block) set(values map[string]string) (string, error) {
	text := b.Text
	for name, value := range values {
		assignment := regexp.MustCompile(`(?m)^` + name + `=\S+`)
		if !assignment.MatchString(text) {
			return "", fmt.Errorf("%s: nothing is assigned to %s", b, name)
		}
		text = assignment.ReplaceAllLiteralString(text, name+"='"+value+"'")
	}
	return text, nil
}
