package config

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const documentReferenceHead = `# Configuration file

Generated from the code by ` + "`make docs`" + `.

` + "`--config FILE`" + ` reads a file with two YAML or JSON documents, in any order. The first is kube-proxy's own
` + "`KubeProxyConfiguration`" + ` (kubeproxy.config.k8s.io/v1alpha1): its fields keep their names, defaults and
meanings; those of other modes are ignored, with a notice in the log. The second one is optional and holds
what kube-proxy does not have. Unknown fields are errors in it.

    apiVersion: kubeproxy.config.k8s.io/v1alpha1
    kind: KubeProxyConfiguration
    mode: ipvs
    clusterCIDR: 10.244.0.0/16
    ---
    apiVersion: kube-ipvs.io/v1alpha1
    kind: KubeIPVSConfiguration
    snat:
      mode: auto

Flags of kube-ipvs's own and of logging take precedence over their fields. kube-proxy's flags are ignored with ` + "`--config`" + `. In the Helm chart, ` + "`proxy`" + ` holds the fields of the first document, and
` + "`ipvs`" + ` those of the second.

To check a file, and to see it with all defaults filled in:

    kube-ipvs --config FILE --hostname-override any --write-config-to /dev/stdout

## KubeIPVSConfiguration

| field | type | default | flag | meaning |
|---|---|---|---|---|
`

// TestDocumentReference checks that docs/reference/configuration.md matches the fields.
func TestDocumentReference(t *testing.T) {
	var defaults KubeIPVSConfiguration
	setOwnDefaults(&defaults)
	r := documentReference{comments: fieldComments(t), flags: fieldFlags(&defaults)}
	r.addStruct(reflect.ValueOf(&defaults).Elem(), "")
	checkPage(t, "configuration.md", documentReferenceHead+r.rows.String())
}

type documentReference struct {
	comments map[string]string       // by type and field
	flags    map[uintptr]*pflag.Flag // by the field's address
	rows     strings.Builder
}

func (r *documentReference) addStruct(v reflect.Value, jsonPath string) {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "" {
			continue // apiVersion and kind
		}
		if f.Type.Kind() == reflect.Struct && f.Type != reflect.TypeFor[metav1.Duration]() {
			r.addStruct(v.Field(i), jsonPath+name+".")
			continue
		}
		flag, meaning := "", r.comments[v.Type().Name()+"."+f.Name]
		if overriding := r.flags[addressOf(v.Field(i))]; overriding != nil {
			meaning, flag = overriding.Usage, "`--"+overriding.Name+"`"
		}
		fmt.Fprintf(&r.rows, "| `%s%s` | %s | %s | %s | %s |\n", jsonPath, name, typeName(f.Type),
			inCode(defaultOf(v.Field(i))), flag, inCell(meaning))
	}
}

func typeName(of reflect.Type) string {
	switch {
	case of == reflect.TypeFor[metav1.Duration]():
		return "duration"
	case of == reflect.TypeFor[Mark]():
		return "mark"
	case of.Kind() == reflect.Pointer:
		return typeName(of.Elem())
	case of.Kind() == reflect.Map:
		return "map of lists"
	}
	return of.Kind().String()
}

func defaultOf(v reflect.Value) string {
	text, err := json.Marshal(v.Interface())
	if err != nil || string(text) == "null" {
		return ""
	}
	return strings.Trim(string(text), `"`)
}

// fieldComments reads the comments of the structs' fields.
func fieldComments(t *testing.T) map[string]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "extension.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok {
			return true
		}
		fields, ok := spec.Type.(*ast.StructType)
		if !ok {
			return false
		}
		for _, f := range fields.Fields.List {
			for _, name := range f.Names {
				text := f.Doc.Text()
				if text == "" {
					text = f.Comment.Text()
				}
				out[spec.Name.Name+"."+name.Name] = strings.Join(strings.Fields(text), " ")
			}
		}
		return false
	})
	return out
}

// fieldFlags returns the flags that set fields of a document, by the field's address.
func fieldFlags(c *KubeIPVSConfiguration) map[uintptr]*pflag.Flag {
	out, flags := map[uintptr]*pflag.Flag{}, documentFlags(c)
	for _, s := range settings {
		out[fieldOf(s, c)] = flags.Lookup(s.name())
	}
	return out
}
