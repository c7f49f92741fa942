// Command cluster brings up a real cluster on this machine, and runs upstream's
// tests against it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/kube-ipvs/kube-ipvs/test/upstream/cluster"
	"github.com/kube-ipvs/kube-ipvs/test/upstream/walk"
)

const usage = `usage: cluster [flags] prepare|up|down|judge|walk

`

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func run() error {
	begin := time.Now()
	config := &cluster.Config{Log: func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, "cluster: [%5.1fs] %s\n", time.Since(begin).Seconds(), fmt.Sprintf(format, args...))
	}}
	flag.Usage = func() {
		fmt.Fprint(flag.CommandLine.Output(), usage)
		flag.PrintDefaults()
	}
	flag.StringVar(&config.Source, "source", ".", "checkout, with deploy/base")
	flag.StringVar(&config.Cache, "cache", ".cache", "directory of the lab's kernel and of built programs")
	flag.StringVar(&config.Served.Proxy, "proxy", cluster.Proxies[0], "what serves the Services")
	flag.IntVar(&config.Nodes, "nodes", 2, "how many nodes")
	flag.StringVar(&config.Image, "image", "", "archive with kube-ipvs's image")
	var j judgement
	flag.StringVar(&j.program, "program", "", "the program that is in it")
	flag.StringVar(&j.focus, "focus", "", "regular expression for the specs to run (default: all that apply)")
	flag.BoolVar(&j.short, "short", false, "run a dozen specs that between them have most of it")
	flag.StringVar(&j.results, "results", "test/upstream/results", "directory of the verdicts")
	flag.StringVar(&j.page, "page", "docs/conformance.md", "page to write")
	flag.UintVar(&j.parallel, "parallel", 0, "how many specs run at once (default: 2, or 1 with more than 3 nodes)")
	w := walk.Walk{Config: config}
	flag.StringVar(&w.Helm, "helm", "", "Helm, for the walk")
	flag.StringVar(&w.Image, "walk-image", "ghcr.io/kube-ipvs/kube-ipvs", "name of the image of kube-ipvs in the archives of -extra")
	flag.StringVar(&w.Version, "walk-version", "v0.1.0", "its tag")
	flag.BoolVar(&w.Short, "walk-short", false, "walk to one node and back only")
	flag.BoolVar(&w.Direct, "walk-direct", false, "walk to all nodes and back, but not back on the way")
	install := flag.Bool("walk-install", false, "walk through the installation guides")
	extra := flag.String("extra", "", "archives with more images for the nodes, separated by commas")
	flag.Parse()
	if *extra != "" {
		config.Extra = strings.Split(*extra, ",")
	}
	for _, path := range []*string{&config.Source, &config.Cache, &config.Image} {
		var err error
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch flag.Arg(0) {
	case "up":
		if err := up(ctx, config, j.program); err != nil {
			return err
		}
		fmt.Println("export KUBECONFIG=" + config.Kubeconfig())
		return nil
	case "prepare":
		return config.Prepare(ctx)
	case "down":
		return config.Down()
	case "judge":
		return runJudge(ctx, config, &j)
	case "walk":
		w.Program = j.program
		if *install {
			return runWalk(ctx, config, &w, w.RunInstallation)
		}
		return runWalk(ctx, config, &w, w.Run)
	case "supervise":
		return supervise(ctx, config)
	}
	flag.Usage()
	return errors.New("nothing to do")
}

// up starts the cluster with the state of the checkout.
func up(ctx context.Context, config *cluster.Config, program string) (err error) {
	if config.Served, err = served(config, program); err != nil {
		return err
	}
	return config.Up(ctx)
}

// runWalk walks through guides, on the running cluster, or else on one that it starts and
// stops.
func runWalk(ctx context.Context, config *cluster.Config, w *walk.Walk, run func(context.Context) error) (err error) {
	if _, err := config.Running(); err == nil {
		return run(ctx)
	}
	if err := up(ctx, config, w.Program); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, config.Down()) }()
	return run(ctx)
}

// supervise takes the two open files from Up, the door and the pipe. No other process may
// inherit them, or the pipe would outlive this process.
func supervise(ctx context.Context, config *cluster.Config) error {
	const doorFile, progressFile = 3, 4
	syscall.CloseOnExec(doorFile)
	syscall.CloseOnExec(progressFile)
	door, err := net.FileListener(os.NewFile(doorFile, "door"))
	if err != nil {
		return err
	}
	progress := os.NewFile(progressFile, "progress")
	return config.Supervise(ctx, flag.Arg(2), flag.Args()[3:], flag.Arg(1), door, progress)
}
