package health

import (
	"fmt"
	"maps"
	"mime"
	"net/http"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/version"
)

// The pages of KEP-4827 and KEP-4828. Kubernetes' handlers are in the API server's
// library, which is larger than this program. These return the same objects and the
// same text.

// component names the program on these pages.
const component = "kube-ipvs"

// zpagesGroup is the API group of the objects.
const zpagesGroup = "config.k8s.io"

// zpagesVersions are the versions of the objects; all have the same fields.
var zpagesVersions = []string{"v1beta1", "v1alpha1"}

type flagzBody struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Flags             map[string]string `json:"flags,omitempty"`
}

type statuszBody struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	StartTime         metav1.Time `json:"startTime"`
	UptimeSeconds     int64       `json:"uptimeSeconds"`
	GoVersion         string      `json:"goVersion"`
	BinaryVersion     string      `json:"binaryVersion"`
	Paths             []string    `json:"paths"`
}

// flagz serves the command line, defaults included.
func flagz(flags map[string]string) http.HandlerFunc {
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(flags)) {
		lines = append(lines, name+"="+flags[name])
	}
	return zpage("Flagz", func() []string { return lines }, func(kind metav1.TypeMeta) any {
		return flagzBody{TypeMeta: kind, ObjectMeta: metav1.ObjectMeta{Name: component}, Flags: flags}
	})
}

// statusz serves the version, the start time and links to other pages.
func statusz(paths []string) http.HandlerFunc {
	status := func() statuszBody {
		start := legacyregistry.GetProcessStart()
		return statuszBody{
			ObjectMeta:    metav1.ObjectMeta{Name: component},
			StartTime:     metav1.NewTime(start),
			UptimeSeconds: int64(time.Since(start).Seconds()),
			GoVersion:     version.Get().GoVersion,
			BinaryVersion: version.Get().GitVersion,
			Paths:         paths,
		}
	}
	return zpage("Statusz", func() []string {
		s := status()
		return []string{
			"Started: " + s.StartTime.Format(time.UnixDate),
			fmt.Sprintf("Up: %s", time.Duration(s.UptimeSeconds)*time.Second),
			"Go version: " + s.GoVersion,
			"Binary version: " + s.BinaryVersion,
			"Paths: " + strings.Join(s.Paths, " "),
		}
	}, func(kind metav1.TypeMeta) any {
		s := status()
		s.TypeMeta = kind
		return s
	})
}

// zpage responds with text, or with the object if the Accept header asks for its kind,
// as in "application/json;v=v1beta1;g=config.k8s.io;as=Flagz".
func zpage(kind string, lines func() []string, object func(metav1.TypeMeta) any) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		asked, ok := accepted(r.Header.Get("Accept"), kind)
		switch {
		case !ok:
			http.Error(w, fmt.Sprintf("only text/plain and application/json;v=%s;g=%s;as=%s are served here", zpagesVersions[0], zpagesGroup, kind), http.StatusNotAcceptable)
		case asked != "":
			answerJSON(w, http.StatusOK, object(metav1.TypeMeta{APIVersion: zpagesGroup + "/" + asked, Kind: kind}))
		default:
			header := []string{"", component + " " + strings.ToLower(kind),
				"Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for debugging purposes only.", ""}
			answerText(strings.Join(append(header, lines()...), "\n")+"\n")(w, r)
		}
	}
}

// accepted returns the version of the object that an Accept header prefers, or "" for
// text. It returns false if the header accepts neither.
func accepted(header, kind string) (version string, ok bool) {
	if strings.TrimSpace(header) == "" {
		return "", true
	}
	for clause := range strings.SplitSeq(header, ",") {
		media, params, err := mime.ParseMediaType(clause)
		if err != nil {
			continue
		}
		switch media {
		case "text/plain", "text/*", "*/*":
			return "", true
		case "application/json":
			if params["g"] == zpagesGroup && params["as"] == kind && slices.Contains(zpagesVersions, params["v"]) {
				return params["v"], true
			}
		}
	}
	return "", false
}
