package document

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

type thing struct {
	Name  string            `json:"name"`
	Count int32             `json:"count"`
	Tags  map[string]string `json:"tags"`
}

func TestSplit(t *testing.T) {
	for _, tc := range []struct {
		name, file string
		want       []string // "number line name"
	}{
		{"nothing", "", nil},
		{"only comments", "# a\n---\n# b\n", nil},
		{"one", "name: a\n", []string{"document 1 (line 1) a"}},
		{"byte order mark", "\ufeffname: a\n", []string{"document 1 (line 1) a"}},
		{"two, with comments before", "# c\n---\nname: a\n---\n\nname: b", []string{"document 1 (line 3) a", "document 2 (line 6) b"}},
		{"marker with content", "--- {name: a}\n--- # c\nname: b\n", []string{"document 1 (line 1) a", "document 2 (line 3) b"}},
		{"windows lines", "name: a\r\n---\r\nname: b\r\n", []string{"document 1 (line 1) a", "document 2 (line 3) b"}},
		{"directive and end marker", "%YAML 1.1\n---\nname: a\n...\n%YAML 1.1\n---\nname: b\n", []string{"document 1 (line 3) a", "document 2 (line 7) b"}},
		{"four dashes are no marker", "name: |\n  x\n----: y\n", []string{"document 1 (line 1) x\n"}},
		{"JSON with tabs", "{\n\t\"name\": \"a\"\n}\n", []string{"document 1 (line 1) a"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got []string
			for _, d := range Split([]byte(tc.file)) {
				var v thing
				if _, err := d.Decode(&v); err != nil {
					t.Fatal(err)
				}
				got = append(got, d.String()+" "+v.Name)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestDecode(t *testing.T) {
	for _, tc := range []struct {
		name, doc string
		want      thing
		loose     []string // part of each
		err       string
	}{
		{"clean", "name: a\ncount: 1\n", thing{Name: "a", Count: 1}, nil, ""},
		{"unknown field", "name: a\ncuont: 1\n", thing{Name: "a"}, []string{`unknown field "cuont"`}, ""},
		{"field twice", "name: a\nname: b\n", thing{Name: "b"}, []string{`"name" already set`}, ""},
		{"field twice in JSON", `{"name":"a","name":"b"}`, thing{Name: "b"}, []string{`duplicate field "name"`}, ""},
		{"wrong case", "Name: a\n", thing{}, []string{`unknown field "Name"`}, ""},
		{"wrong type", "count: many\n", thing{}, nil, "thing.count"},
		{"no YAML", "name: [a\n", thing{}, nil, "line 1"},
		{"number too large", "count: 4294967296\n", thing{}, nil, "count"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got thing
			loose, err := Split([]byte(tc.doc))[0].Decode(&got)
			switch {
			case tc.err == "" && err != nil:
				t.Fatal(err)
			case tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)):
				t.Fatalf("error %v, want one with %q", err, tc.err)
			case tc.err != "":
				return
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
			if len(loose) != len(tc.loose) {
				t.Fatalf("loose: %v, want %q", loose, tc.loose)
			}
			for i, want := range tc.loose {
				if !strings.Contains(loose[i].Error(), want) {
					t.Errorf("loose: %v, want one with %q", loose[i], want)
				}
			}
		})
	}
}

func TestItems(t *testing.T) {
	items, err := Split([]byte("items:\n- name: a\n- count: x\n- name: c\n"))[0].Items()
	if err != nil || len(items) != 3 {
		t.Fatal(items, err)
	}
	var v thing
	if _, err := items[1].Decode(&v); err == nil {
		t.Error("item 2 is broken, but no error")
	}
	if _, err := items[2].Decode(&v); err != nil || v.Name != "c" {
		t.Errorf("item 3: %v, %v", v, err)
	}
	if got, want := items[2].String(), "document 1 (line 1), item 3"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if _, err := Split([]byte("items: 1\n"))[0].Items(); err == nil {
		t.Error("items that are no list, but no error")
	}
}

func FuzzDecode(f *testing.F) {
	for _, s := range []string{"a: 1\n---\nname: b\n", "{}\n...\n", "--- [\n", "%\n---\n%\n", "\ufeff---\n", "a: &a [*a]\n", "{\"name\":1}"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, file []byte) {
		for i, d := range Split(file) {
			if d.Number != i+1 || d.Line < 1 {
				t.Fatalf("%d is %s", i, d)
			}
			var v thing
			_, _ = d.Decode(&v)
		}
	})
}
