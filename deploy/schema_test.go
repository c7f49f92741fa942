package deploy

import (
	"encoding/json"
	"flag"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kube-ipvs/kube-ipvs/pkg/config"
)

var update = flag.Bool("update", false, "write install.yaml and the generated part of chart/values.schema.json")

const schemaFile = "chart/values.schema.json"

// TestValuesSchema checks that the chart's schema has the fields of
// KubeIPVSConfiguration, and with -update writes them.
func TestValuesSchema(t *testing.T) {
	text := read(t, schemaFile)
	var schema map[string]any
	if err := json.Unmarshal([]byte(text), &schema); err != nil {
		t.Fatal(err)
	}
	own := schemaOf(reflect.TypeFor[config.KubeIPVSConfiguration]())
	own["description"] = "Fields of KubeIPVSConfiguration"
	schema["properties"].(map[string]any)["ipvs"] = own
	want, err := json.MarshalIndent(schema, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	checkFile(t, schemaFile, string(want)+"\n", text)
}

// schemaOf returns the JSON schema of a type of the configuration.
func schemaOf(of reflect.Type) map[string]any {
	switch of {
	case reflect.TypeFor[metav1.Duration]():
		return map[string]any{"type": "string"}
	case reflect.TypeFor[config.Mark]():
		return map[string]any{"type": []string{"integer", "string"}}
	case reflect.TypeFor[config.SNATMode](), reflect.TypeFor[config.LocalMark]():
		return map[string]any{"type": []string{"string", "boolean"}} // off, unquoted, is false
	}
	switch of.Kind() {
	case reflect.Pointer:
		return schemaOf(of.Elem())
	case reflect.Struct:
		return map[string]any{"type": "object", "additionalProperties": false, "properties": fieldsOf(of)}
	case reflect.Map:
		return map[string]any{"type": "object", "additionalProperties": schemaOf(of.Elem())}
	case reflect.Slice:
		return map[string]any{"type": "array", "items": schemaOf(of.Elem())}
	case reflect.Bool:
		return map[string]any{"type": "boolean"}
	case reflect.String:
		return map[string]any{"type": "string"}
	case reflect.Float32, reflect.Float64:
		return map[string]any{"type": "number"}
	}
	return map[string]any{"type": "integer"}
}

func fieldsOf(of reflect.Type) map[string]any {
	out := map[string]any{}
	for i := range of.NumField() {
		name, options, _ := strings.Cut(of.Field(i).Tag.Get("json"), ",")
		if slices.Contains(strings.Split(options, ","), "inline") {
			continue // apiVersion and kind are the chart's to write
		}
		out[name] = schemaOf(of.Field(i).Type)
	}
	return out
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// readOrEmpty lets a generated file be written for the first time.
func readOrEmpty(t *testing.T, name string) string {
	t.Helper()
	if _, err := os.Stat(name); err != nil {
		return ""
	}
	return read(t, name)
}

// checkFile compares a generated file with what it should be, or writes it.
func checkFile(t *testing.T, name, want, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(name, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("deploy/%s is stale, make docs writes it (-want +got):\n%s", name, diff)
	}
}
