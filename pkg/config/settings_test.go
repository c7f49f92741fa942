package config

import (
	"cmp"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"testing"

	"github.com/spf13/pflag"
)

// noFlag are the fields without a flag of their own.
var noFlag = map[string]bool{"drainLostNodes": true} // see overOwn

// noField are our flags without a field.
var noField = map[string]bool{"once": true, "dry-run": true, "drain-lost-nodes": true}

// TestSettings checks that settings has each field and each flag of ours exactly once, and that what
// follows from an entry is about its field: the flag sets it and no other, errors name it, and the
// profile changes it.
func TestSettings(t *testing.T) {
	o := NewOptions()
	missing, inProfile := map[string]bool{}, values(t, func(c *KubeIPVSConfiguration) { setOwnCompat(c, CompatKubeProxy) })
	eachField(&o.own, func(path string, _ reflect.Value) { missing[path] = !noFlag[path] })
	flags := map[string]bool{}
	for _, s := range settings {
		path := fieldPaths(&o.own)[fieldOf(s, &o.own)]
		if !missing[path] {
			t.Errorf("--%s sets %q, which is no field or has another flag", s.name(), path)
		}
		missing[path], flags[s.name()] = false, true
		if o.fields[s.name()] != path {
			t.Errorf("errors about --%s name %q, want %q", s.name(), o.fields[s.name()], path)
		}
		flagged := values(t, func(c *KubeIPVSConfiguration) {
			setOwnDefaults(c)
			flag := documentFlags(c).Lookup(s.name())
			if err := flag.Value.Set(another(flag)); err != nil {
				t.Fatal(err)
			}
		})
		if got := differing(values(t, setOwnDefaults), flagged); !slices.Equal(got, []string{path}) {
			t.Errorf("--%s changes %q, want %q", s.name(), got, path)
		}
		if got := values(t, s.setCompat); got[path] != inProfile[path] {
			t.Errorf("the profile sets %s to %s, want %s", path, inProfile[path], got[path])
		}
	}
	for path, is := range missing {
		if is {
			t.Errorf("%s has no entry in settings", path)
		}
	}
	o.flags.own.VisitAll(func(f *pflag.Flag) {
		if flags[f.Name] == noField[f.Name] {
			t.Errorf("--%s: in settings %t, in noField %t", f.Name, flags[f.Name], noField[f.Name])
		}
	})
}

// values returns the fields of a document by path, after a change of an empty one and with defaults.
func values(t *testing.T, change func(*KubeIPVSConfiguration)) map[string]string {
	t.Helper()
	var c KubeIPVSConfiguration
	change(&c)
	setOwnDefaults(&c)
	out := map[string]string{}
	eachField(&c, func(path string, v reflect.Value) { out[path] = defaultOf(v) })
	return out
}

// differing returns the fields that differ, sorted.
func differing(a, b map[string]string) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(a)), func(path string) bool { return a[path] == b[path] })
}

// another returns a value that a flag does not have.
func another(f *pflag.Flag) string {
	switch f.Value.Type() {
	case "bool":
		return strconv.FormatBool(f.DefValue != "true")
	case "int":
		return "7"
	case "duration":
		return "7s"
	case "string":
		return "another"
	case "stringSlice":
		return "eth1=10.0.0.1,eth1=fd00::1"
	}
	return "0x70"
}

// TestPathsAreOfFlags checks that every setting that an error may name is a flag, and has a field if a
// file can set it.
func TestPathsAreOfFlags(t *testing.T) {
	o := NewOptions()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	calls := 0
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			flag, ok := pathArgument(n)
			if !ok {
				return true
			}
			calls++
			known := flag == "logging" || cmp.Or(o.flags.own.Lookup(flag), o.flags.proxy.Lookup(flag), o.flags.general.Lookup(flag)) != nil
			if !known || o.fields[flag] == "" && flag != "master" {
				t.Errorf("path(%q): is a flag %t, field %q", flag, known, o.fields[flag])
			}
			return true
		})
	}
	if calls < 40 {
		t.Errorf("found %d calls of path", calls)
	}
}

// pathArgument returns the flag that is passed to a path function, or to seconds, which passes it on.
func pathArgument(n ast.Node) (string, bool) {
	call, ok := n.(*ast.CallExpr)
	if !ok || len(call.Args) == 0 {
		return "", false
	}
	callee := ""
	switch f := call.Fun.(type) {
	case *ast.SelectorExpr:
		callee = f.Sel.Name
	case *ast.Ident:
		callee = f.Name
	}
	flag, ok := call.Args[0].(*ast.BasicLit)
	if !ok || callee != "path" && callee != "seconds" {
		return "", false
	}
	name, err := strconv.Unquote(flag.Value)
	return name, err == nil
}
