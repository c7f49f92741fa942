//go:build e2e

package bench

import (
	"os"
	"path/filepath"
	"testing"
)

// shortFile holds the figures that TestInstructionsShort compares with.
const shortFile = "test/bench/instructions/short.json"

// allowedMore is the allowed increase. Without a change of the program or the kernel,
// figures vary by less than 1 %.
const allowedMore = 0.02

// tries is how often a figure that is too high is measured. Disturbances only increase a
// figure.
const tries = 3

// TestInstructionsShort fails if an exchange through kube-ipvs takes more instructions
// than the committed figure allows. On another kernel than the committed figures', the
// limit moves by the difference of the floors. A figure here is its lowest batch: some
// workloads take one of two numbers of instructions in each batch, 4 % apart, and then the
// median is one of both by chance. It writes new figures to $LAB_OUT. With
// INSTRUCTIONS_UPDATE it compares nothing.
func TestInstructionsShort(t *testing.T) {
	committed, err := LoadFigures(filepath.Join(os.Getenv("LAB_SRC"), shortFile))
	must(t, err)
	loadModules(t)
	b := &bench{t: t, results: NewResults(), api: newAPI(t)}
	b.api.addNode()
	b.api.grow(shortServices)
	w := &world{name: defaultWorld, services: []*countedService{plainService, portService}, paths: []path{clusterIPPath, nodePortPath}}
	b.api.enter(w)
	now := &Figures{Facts: map[string]string{"kernel": release(), "kube-ipvs": os.Getenv("BENCH_VERSION")}}
	for _, s := range countedSubjects() {
		if s.name == floorName || s.name == KubeIPVS {
			t.Run(s.name, func(t *testing.T) {
				c := &counting{testbed: newTestbed(t, s.program, w), subject: s, world: w, services: shortServices, figures: now, lowest: true}
				c.begin()
				c.measure("", w.paths)
				if s.name == KubeIPVS && os.Getenv("INSTRUCTIONS_UPDATE") == "" {
					c.compare(committed)
				}
				c.end()
			})
		}
	}
	must(t, now.Save(filepath.Join(os.Getenv("LAB_OUT"), "short.json")))
}

const shortServices = 10

// compare fails the test for each figure that is still too high after several tries.
func (c *counting) compare(committed *Figures) {
	if len(committed.List) == 0 {
		c.t.Fatalf("%s has no figures to compare with", shortFile)
	}
	for _, p := range c.world.paths {
		for _, w := range workloads {
			place := Figure{Services: c.services, World: c.world.name, Subject: KubeIPVS, Path: p.name, Workload: w.title}
			allowed := c.allowed(committed, place)
			value, _ := c.figures.value(place)
			for try := 1; try < tries && value > allowed; try++ {
				c.figure("", p, w)
				again, _ := c.figures.value(place)
				value = min(value, again)
			}
			if value > allowed {
				c.t.Errorf("%s, %s: %d instructions, more than the %d that %s allows", p.name, w.title, value, allowed, shortFile)
			}
		}
	}
}

// allowed returns the limit of a figure.
func (c *counting) allowed(committed *Figures, place Figure) int {
	value, ok := committed.value(place)
	if !ok {
		c.t.Errorf("%s has no figure for %+v", shortFile, place)
	}
	scale := 1 + allowedMore
	if committed.Facts["kernel"] != c.figures.Facts["kernel"] {
		floor := place
		floor.Subject = floorName
		then, _ := committed.value(floor)
		now, _ := c.figures.value(floor)
		if then > 0 {
			scale *= float64(now) / float64(then)
		}
	}
	return int(float64(value) * scale)
}
