// Command sbom checks CycloneDX documents: against the schema of the format, and with
// the library of its makers, which must read everything that is in them. It is a module
// of its own, so that neither is a dependency of the product.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	cyclonedx "github.com/CycloneDX/cyclonedx-go"
	"github.com/santhosh-tekuri/jsonschema/v6"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) < 2 {
		log.Fatal("usage: sbom FILE...")
	}
	for _, name := range os.Args[1:] {
		text, err := os.ReadFile(name)
		if err == nil {
			err = check(text)
		}
		if err != nil {
			log.Fatalf("%s: %v", name, err)
		}
		fmt.Println(filepath.Base(name) + ": is a valid CycloneDX document")
	}
}

// check returns an error if a document breaks its schema, or does not survive being read
// and written.
func check(text []byte) error {
	schema, err := schema()
	if err != nil {
		return err
	}
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return err
	}
	if err := schema.Validate(document); err != nil {
		return err
	}
	var bom cyclonedx.BOM
	if err := cyclonedx.NewBOMDecoder(bytes.NewReader(text), cyclonedx.BOMFileFormatJSON).Decode(&bom); err != nil {
		return err
	}
	return unique(&bom)
}

// unique returns an error if a component is listed twice, or there is none.
func unique(bom *cyclonedx.BOM) error {
	if bom.Components == nil || len(*bom.Components) == 0 {
		return errors.New("no components")
	}
	seen := map[string]bool{}
	for _, c := range *bom.Components {
		if seen[c.PackageURL] || !strings.HasPrefix(c.PackageURL, "pkg:") {
			return fmt.Errorf("component %s: its package URL %q is missing, or another one's", c.Name, c.PackageURL)
		}
		seen[c.PackageURL] = true
	}
	return nil
}

// schema compiles the schema that the library's module has.
func schema() (*jsonschema.Schema, error) {
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/CycloneDX/cyclonedx-go").Output()
	if err != nil {
		return nil, fmt.Errorf("find the schema: %w", err)
	}
	compiler := jsonschema.NewCompiler()
	compiler.AssertFormat()
	const name = "bom-1.6.schema.json"
	for file, id := range map[string]string{
		name: name, "spdx.schema.json": "spdx.schema.json", "jsf-0.82.schemax.json": "jsf-0.82.schema.json",
	} {
		text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "schema", file))
		if err != nil {
			return nil, err
		}
		var document map[string]any
		if err := json.Unmarshal(text, &document); err != nil {
			return nil, err
		}
		if err := compiler.AddResource("http://cyclonedx.org/schema/"+id, document); err != nil {
			return nil, err
		}
	}
	return compiler.Compile("http://cyclonedx.org/schema/" + name)
}
